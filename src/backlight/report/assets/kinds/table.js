// Rows of names and values, and the tree of modules behind a fold.

KINDS.table = async (host, { rows, tree }) => () => {
  host.append(
    el("dl", { class: "pairs" }, rows.map(([label, value]) => [el("dt", {}, label), el("dd", {}, value)])),
  );
  if (!tree.length) return;
  host.append(
    el(
      "details",
      {},
      el("summary", {}, `Module tree (${count(tree.length, "module")})`),
      el(
        "div",
        { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Module tree" },
        el("table", { class: "plain" }, el("tbody", {}, tree.map(([name, kind]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, kind))))),
      ),
    ),
  );
};

KINDS.words = async (host, { text }) => () => host.append(el("p", {}, text));

KINDS.events = async (host, { rows }) => () => {
  const step = ({ step: first, until, times }) => {
    if (first === null) return "–";
    return times > 1 && until !== null && until !== first ? `${number(first)} to ${number(until)}` : number(first);
  };
  host.append(
    el(
      "div",
      { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Events" },
      el(
        "table",
        { class: "plain" },
        el("thead", {}, el("tr", {}, ["Step", "Event", "What"].map((text, i) => el("th", { scope: "col", class: i ? "" : "figure narrow" }, text)))),
        el(
          "tbody",
          {},
          rows.map((row) =>
            el(
              "tr",
              {},
              el("td", { class: "figure" }, step(row)),
              el("th", { scope: "row" }, row.kind.replaceAll("_", " ")),
              el("td", {}, row.text, row.times > 1 ? el("span", { class: "chip" }, `${number(row.times)} times`) : ""),
            ),
          ),
        ),
      ),
    ),
  );
};

// Rows of cells under heads; `figures` are the columns of numbers.
KINDS.listing = async (host, { name, heads, figures, rows }) => () => {
  const kind = (i) => (figures.includes(i) ? "figure" : i === heads.length - 1 ? "words" : "");
  host.append(
    el(
      "div",
      { class: "scroll tall", tabindex: "0", role: "region", "aria-label": name },
      el(
        "table",
        { class: "plain" },
        el("thead", {}, el("tr", {}, heads.map((text, i) => el("th", { scope: "col", class: kind(i) }, text)))),
        el(
          "tbody",
          {},
          rows.map((cells) => el("tr", {}, cells.map((text, i) => (i === 0 ? el("th", { scope: "row" }, text) : el("td", { class: kind(i) }, text))))),
        ),
      ),
    ),
  );
};
