// Tables of figures, one below the other; long ones scroll.

KINDS.figures = async (host, { tables }) => () => {
  for (const { title, columns, numbers, rows } of tables) {
    const figure = (i) => (numbers.includes(i) ? "figure" : "");
    if (title) host.append(el("h3", {}, title));
    host.append(
      el(
        "div",
        { class: rows.length > 15 ? "scroll tall" : "scroll", tabindex: "0", role: "region", "aria-label": title || columns[0] },
        el(
          "table",
          { class: "plain" },
          el("thead", {}, el("tr", {}, columns.map((text, i) => el("th", { scope: "col", class: figure(i) }, text)))),
          el(
            "tbody",
            {},
            rows.map((row) => el("tr", {}, row.map((text, i) => (i ? el("td", { class: figure(i) }, text) : el("th", { scope: "row" }, text))))),
          ),
        ),
      ),
    );
  }
};
