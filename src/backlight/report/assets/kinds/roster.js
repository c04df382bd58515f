// Every parameter in a table: sorted by any column, limited by the search, a click chooses it.

const FIRST_ROWS = 50;

/** @type {RosterColumn[]} */
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

/** @param {HTMLElement} host @param {ParameterGrid} grid @param {any} state */
const parameterTable = (host, grid, state) => {
  const columns = ROSTER.filter(({ key, of }) => of || grid.stats[key]);
  /** @type {(column: RosterColumn, row: number) => any} */
  const value = ({ key, of }, row) => (of ? of(row) : grid.stats[key][row]);
  const sort = (state.sort ??= { column: 0, down: false, by: null });
  sort.by = (column) => {
    sort.down = sort.column === column ? !sort.down : !columns[column].up;
    sort.column = column;
    show();
  };
  const box = el("div", {});
  const order = () => {
    const rows = view.matches ? [...view.matches] : report.parameters.map((_, row) => row);
    const missing = (content) => typeof content === "number" && Number.isNaN(content);
    return rows.sort((a, b) => {
      const [left, right] = [value(columns[sort.column], a), value(columns[sort.column], b)];
      // What was not measured stays at the end, whichever way is up.
      if (missing(left) || missing(right)) return Number(missing(left)) - Number(missing(right)) || a - b;
      const ahead = typeof left === "string" ? left.localeCompare(right, "en", { numeric: true }) : left - right;
      return (sort.down ? -ahead : ahead) || a - b;
    });
  };
  const cell = (column, row) => {
    const content = value(column, row);
    if (column.key === "name") return el("button", { type: "button", class: "link", onclick: () => view.set("row", row) }, breakable(content));
    if (!(typeof content === "number" && Number.isNaN(content))) {
      const text = column.show ? column.show(content, row) : number(content, 3);
      return column.key === "non_finite_sum" && content > 0 ? el("span", { class: "alarm" }, text) : text;
    }
    // A figure that is NaN although the parameter was measured is a measured NaN only where it was one.
    if (!isMeasured(row)) return el("span", { title: `not measured: ${report.reasons[report.parameters[row].name] ?? ""}` }, "–");
    return grid.stats.non_finite_sum?.[row] > 0 && column.key !== "ratio_median" ? "NaN" : "–";
  };
  const isMeasured = (row) => grid.stats.measured[row] > 0;
  const show = () => {
    const rows = order();
    const shown = state.all || rows.length <= 1.5 * FIRST_ROWS ? rows : rows.slice(0, FIRST_ROWS);
    if (view.row !== null && rows.includes(view.row) && !shown.includes(view.row)) shown.push(view.row);
    const showAll = () => {
      state.all = true;
      show();
    };
    fill(
      box,
      el("h3", { class: "roster-head" }, "All parameters ", el("span", { class: "hint", role: "status" }, view.matches ? `${count(rows.length, "parameter")} of ${number(report.parameters.length)} match` : "")),
      table({
        name: "All parameters", id: "roster", kind: "roster", first: 1, sort, heads: columns.map(({ label }) => label),
        figures: columns.flatMap(({ key }, i) => (key === "name" ? [] : [i])),
        rows: shown.map((row) => columns.map((column) => cell(column, row))),
        row: (i) => ({ data: { row: String(shown[i]) }, class: isMeasured(shown[i]) ? null : "never" }),
      }),
      el("button", { type: "button", class: "quiet", hidden: shown.length >= rows.length, onclick: showAll }, `Show all ${number(rows.length)}`),
    );
    mark();
  };
  const mark = () => {
    for (const line of /** @type {NodeListOf<HTMLElement>} */ (box.querySelectorAll("tbody tr"))) line.classList.toggle("chosen", Number(line.dataset.row) === view.row);
  };
  host.append(box);
  view.on("matches", () => {
    state.all = false;
    show();
  }, box);
  view.on("row", () => (view.row === null || box.querySelector(`tr[data-row="${view.row}"]`) ? mark() : show()), box);
  show();
  return show;
};
