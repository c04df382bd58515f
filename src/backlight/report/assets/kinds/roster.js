// Every parameter in a table: sorted by any column, limited by the search, a click chooses it.

const FIRST_ROWS = 50;

const ROSTER = [
  { key: "order", label: "#", of: (row) => row, show: (value) => number(value + 1), up: true },
  { key: "name", label: "Parameter", of: (row) => report.parameters[row].name, up: true },
  { key: "shape", label: "Shape", of: (row) => report.parameters[row].numel, show: (_, row) => report.parameters[row].shape },
  { key: "rms_last", label: "rms, last" },
  { key: "rms_median", label: "rms, median" },
  { key: "rms_max", label: "rms, largest" },
  { key: "max_abs_max", label: "|g|, largest" },
  { key: "zero_share_last", label: "zeros, last", show: (value) => `${number(100 * value, 3)} %` },
  { key: "non_finite_sum", label: "NaN, Inf" },
  { key: "ratio_median", label: "update" },
];

const parameterTable = (host, grid) => {
  const columns = ROSTER.filter(({ key, of }) => of || grid.stats[key]);
  const value = ({ key, of }, row) => (of ? of(row) : grid.stats[key][row]);
  const sort = { column: columns[0], down: false };
  let all = false;
  const body = el("tbody", {});
  const more = el("button", { type: "button", class: "quiet", onclick: () => ((all = true), fill()) });
  const said = el("span", { class: "hint", role: "status" });
  const heads = columns.map((column) => {
    const button = el("button", {
      type: "button",
      onclick: () => {
        sort.down = sort.column === column ? !sort.down : !column.up;
        sort.column = column;
        fill();
      },
    }, column.label);
    return el("th", { scope: "col", class: column.key === "name" ? "" : "figure" }, button);
  });
  const order = () => {
    const rows = view.matches ? [...view.matches] : report.parameters.map((_, row) => row);
    const missing = (content) => typeof content === "number" && Number.isNaN(content);
    rows.sort((a, b) => {
      const [left, right] = [value(sort.column, a), value(sort.column, b)];
      // What was not measured stays at the end, whichever way is up.
      if (missing(left) || missing(right)) return missing(left) - missing(right) || a - b;
      const ahead = typeof left === "string" ? left.localeCompare(right, "en", { numeric: true }) : left - right;
      return (sort.down ? -ahead : ahead) || a - b;
    });
    return rows;
  };
  const cell = (column, row) => {
    const content = value(column, row);
    if (column.key === "name") {
      const name = el("button", { type: "button", class: "link", onclick: () => view.set("row", row) }, breakable(content));
      return el("th", { scope: "row" }, name);
    }
    const measured = grid.stats.measured[row] > 0;
    const none = typeof content === "number" && Number.isNaN(content);
    const broken = column.key === "non_finite_sum" && content > 0;
    // A figure that is NaN although the parameter was measured is a measured NaN only where it was one.
    const text = none ? (measured && grid.stats.non_finite_sum?.[row] > 0 && column.key !== "ratio_median" ? "NaN" : "–") : column.show ? column.show(content, row) : number(content, 3);
    return el("td", { class: broken ? "figure alarm" : "figure", title: none && !measured ? `not measured: ${report.reasons[report.parameters[row].name] ?? ""}` : null }, text);
  };
  const mark = () => {
    for (const line of body.children) line.classList.toggle("chosen", Number(line.dataset.row) === view.row);
  };
  const fill = () => {
    const rows = order();
    const shown = all || rows.length <= 1.5 * FIRST_ROWS ? rows : rows.slice(0, FIRST_ROWS);
    if (view.row !== null && rows.includes(view.row) && !shown.includes(view.row)) shown.push(view.row);
    body.replaceChildren(
      ...shown.map((row) => {
        const never = !(grid.stats.measured[row] > 0);
        return el("tr", { data: { row: String(row) }, class: never ? "never" : "" }, columns.map((column) => cell(column, row)));
      }),
    );
    heads.forEach((head, i) => head.setAttribute("aria-sort", columns[i] !== sort.column ? "none" : sort.down ? "descending" : "ascending"));
    more.hidden = shown.length >= rows.length;
    more.textContent = `Show all ${number(rows.length)}`;
    said.textContent = view.matches ? `${count(rows.length, "parameter")} of ${number(report.parameters.length)} match` : "";
    mark();
  };
  host.append(
    el("h3", { class: "roster-head" }, "All parameters ", said),
    el(
      "div",
      { class: "scroll roster", tabindex: "0", role: "region", "aria-label": "All parameters" },
      el("table", { class: "plain", id: "roster" }, el("thead", {}, el("tr", {}, heads)), body),
    ),
    more,
  );
  view.on("matches", () => ((all = false), fill()), body);
  view.on("row", () => (view.row === null || body.querySelector(`tr[data-row="${view.row}"]`) ? mark() : fill()), body);
  fill();
  return fill;
};
