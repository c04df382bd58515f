// The parameters: a heat map of steps by layers, the chosen one in detail, and all of them in a table.

// The data behind the heat map, which the depth chart reads as well.
class ParameterGrid {
  /** @param {ParameterData} data */
  constructor(data) {
    Object.assign(this, data);
    this.amount = report.parameters.length;
  }

  // Newer or closer data in the place of these: the step that was chosen stays chosen.
  take(data) {
    const step = view.bucket === null ? null : this.first[view.bucket];
    Object.assign(this, data);
    if (step !== null) view.bucket = Math.max(0, this.last.findIndex((last) => last >= step));
  }

  column(name) {
    return this.columns.find((column) => column.name === name);
  }

  // For each range of steps whether the series was recorded in it, of any parameter.
  recordedAt(series) {
    const recorded = new Uint8Array(this.first.length);
    this.measured[series].forEach((amount, i) => (recorded[i % recorded.length] ||= amount > 0 ? 1 : 0));
    return recorded;
  }

  async planes(name) {
    const column = this.column(name);
    if (!column.high) Object.assign(column, await report.column(name)); // a live page holds what is looked at
    const high = await unpack(column.high);
    return { high, low: column.low ? await unpack(column.low) : high };
  }
}

// The range of colours: what lies beyond the outermost thousandth of the cells is clamped, and said to be.
/** @type {(column: ColumnData, planes: Planes) => ColourRange | null} */
const rangeOf = ({ scale }, { high, low }) => {
  if (scale === "count") return null;
  if (scale === "share") return { low: 0, high: 1, log: false, clamped: [false, false] };
  const values = [];
  const stride = Math.max(1, Math.floor(high.length / 40000));
  let [least, most] = [Infinity, 0];
  for (let i = 0; i < high.length; i += 1) {
    if (high[i] > 0 && Number.isFinite(high[i])) most = Math.max(most, high[i]);
    if (low[i] > 0 && Number.isFinite(low[i])) least = Math.min(least, low[i]);
    if (i % stride === 0) {
      if (low[i] > 0 && Number.isFinite(low[i])) values.push(low[i]);
      if (high[i] > 0 && Number.isFinite(high[i])) values.push(high[i]);
    }
  }
  if (!values.length) return { low: 1, high: 10, log: true, clamped: [false, false] };
  values.sort((a, b) => a - b);
  const at = (share) => values[Math.min(values.length - 1, Math.floor(share * values.length))];
  let [from, to] = [Math.log10(at(0.001)), Math.log10(at(0.999))];
  if (to - from > 4) [from, to] = [Math.floor(from), Math.ceil(to)];
  if (to - from < 0.1) [from, to] = [from - 0.5, to + 0.5];
  return { low: 10 ** from, high: 10 ** to, log: true, clamped: [least < 0.99 * 10 ** from, most > 1.01 * 10 ** to] };
};

/** @type {(grid: ParameterGrid, column: ColumnData, values: Float64Array, range: ColourRange | null) => Uint8Array} */
const codesOf = (grid, column, values, range) => {
  const measured = grid.measured[column.series];
  const broken = grid.broken[column.series];
  const codes = new Uint8Array(values.length);
  const [from, span] = !range ? [0, 1] : range.log ? [Math.log10(range.low), Math.log10(range.high / range.low)] : [range.low, range.high - range.low];
  for (let i = 0; i < values.length; i += 1) {
    const value = values[i];
    if (!measured[i]) codes[i] = UNMEASURED;
    else if (broken[i]) codes[i] = BROKEN;
    else if (Number.isNaN(value)) codes[i] = UNDEFINED;
    else if (column.scale === "count") codes[i] = value > 0 ? BROKEN : NONE;
    else if (value === 0 && column.scale === "log") codes[i] = ZERO;
    else {
      const share = range.log ? (value > 0 ? (Math.log10(value) - from) / span : 0) : (value - from) / span;
      codes[i] = RAMP + Math.round(Math.min(Math.max(share, 0), 1) * (STEPS - 1));
    }
  }
  return codes;
};

// Where cells share a pixel: what is not finite wins, then the larger or the smaller value, then a zero, then
// what has no value.
const mergeBy = (largest) => (a, b) => {
  if (a === b || a === BROKEN) return a;
  if (b === BROKEN) return b;
  if (a < ZERO || b < ZERO) return Math.max(a, b);
  return largest === a > b ? a : b;
};

KINDS.parameters = async (body, data, state) => {
  const next = new ParameterGrid(data);
  const { grid } = state;
  const names = ({ columns }) => columns.map(({ name }) => name).join();
  if (grid && next.amount === grid.amount && names(next) === names(grid)) {
    for (const { name, high } of next.columns) if (high) await next.planes(name);
    await view.rest();
    grid.take(data.window ? { ...data, stats: grid.stats } : data); // the table is about the whole run
    await state.show();
    if (data.window) return;
    await view.rest();
    state.fill();
    return;
  }
  if (data.window) return;
  body.replaceChildren();
  state.grid = view.grid = next;
  view.column = next.column(view.column)?.name ?? next.columns[0].name;
  state.show = await heatMap(body, next, state);
  state.fill = parameterTable(body, next, state);
};

// The block of a parameter: up to the first number in its name, else the first part.
const blockOf = (name) => /^(.*?\.\d+)\./.exec(name)?.[1] ?? name.split(".")[0];

/** @param {HTMLElement} host @param {ParameterGrid} grid @param {any} panel */
const heatMap = async (host, grid, panel) => {
  const choice = el(
    "select",
    { id: "column", onchange: () => view.set("column", choice.value) },
    grid.columns.map(({ name, label }) => el("option", { value: name }, label)),
  );
  const which = el("select", { id: "which", onchange: () => show() }, el("option", { value: "high" }, "largest"), el("option", { value: "low" }, "smallest"));
  const only = el("input", { type: "checkbox", id: "only", checked: view.onlyMatches, onchange: () => view.set("onlyMatches", only.checked) });
  const rowsChip = el("button", { type: "button", class: "chip", hidden: true, onclick: () => zoomRows(null) });
  const noMatch = el("p", { class: "empty", hidden: true }, "No parameter matches the search.");
  const meaning = el("span", { class: "hint" });
  const legend = el("div", { class: "map-legend" });
  const box = el("div", { class: "map", id: "heat-map" });
  const detail = el("div", { class: "detail" });
  const whichLabel = el("label", { for: "which", hidden: grid.exact }, "of each range the ", which);
  const onlyLabel = el("label", { for: "only", class: "check", hidden: true }, only, " only rows that match the search");
  host.append(
    el(
      "div",
      { class: "controls" },
      el("label", { for: "column" }, "Colour ", choice),
      whichLabel,
      onlyLabel,
      rowsChip,
      meaning,
    ),
    legend,
    box,
    noMatch,
    detail,
  );
  let zoomed = null;
  /** @type {Cells} */
  let cells = null;
  const rows = () => {
    if (!cells) return []; // asked for the first time before the colours are there
    const from = zoomed ?? Array.from({ length: grid.amount }, (_, row) => row);
    if (!view.matches || !view.onlyMatches) return from;
    const wanted = new Set(view.matches);
    return from.filter((row) => wanted.has(row));
  };
  const map = new Grid(box, grid.first, grid.last, {
    name: "Heat map of steps by parameters. Arrow keys move from cell to cell, Enter chooses the parameter, plus and minus zoom, Escape shows everything.",
    rows,
    height: (shown) => {
      if (shown <= 64) return Math.max(60, shown * (shown <= 12 ? 26 : shown <= 30 ? 18 : 13));
      return Math.min(960, Math.max(832, 1.6 * shown));
    },
    marked: () => (view.matches && !view.onlyMatches ? view.matches : []),
    label: (row) => report.parameters[row].name,
    group: (row) => report.parameters[row].name.split("."),
    block: (row) => blockOf(report.parameters[row].name),
    code: (row, bucket) => cells.codes[row * cells.amount + bucket],
    merge: (a, b) => cells.merge(a, b),
    describe: (row, bucket) => describeCell(grid, cells, row, bucket),
    pick: (row, bucket) => {
      view.set("row", row);
      if (bucket !== null) view.set("bucket", bucket);
    },
    zoomRows: (chosen) => zoomRows(chosen),
  });
  const zoomRows = (chosen) => {
    zoomed = chosen && chosen.length < grid.amount ? chosen : null;
    rowsChip.hidden = !zoomed;
    rowsChip.textContent = zoomed ? `${count(zoomed.length, "row")} of ${number(grid.amount)} · show all` : "";
    map.draw();
  };
  const showLegend = () => {
    const codes = new Set(cells.codes);
    if (map.isSparse) codes.add(UNMEASURED);
    legendBar(legend, cells.range, (code) => codes.has(code));
  };
  const show = async () => {
    const column = grid.column(view.column);
    const planes = await grid.planes(column.name);
    const range = rangeOf(column, planes);
    const values = planes[which.value];
    if (cells) await view.rest();
    const codes = codesOf(grid, column, values, range);
    if (cells) await view.rest();
    cells = { column, planes, range, amount: grid.first.length, codes, merge: mergeBy(which.value === "high") };
    if (map.first !== grid.first) {
      const { cursor } = map;
      map.cut(grid.first, grid.last);
      if (cursor && cursor.bucket < grid.first.length) map.cursor = cursor;
    }
    choice.value = column.name;
    meaning.textContent = column.meaning;
    showLegend();
    map.draw();
    showDetail(detail, grid, cells, panel);
  };
  view.on("column", show, box);
  view.on("theme", showLegend, legend);
  view.on("row", () => showDetail(detail, grid, cells, panel), detail);
  view.on("matches onlyMatches", () => {
    onlyLabel.hidden = !view.matches;
    noMatch.hidden = !(view.matches && view.onlyMatches && rows().length === 0);
    box.hidden = !noMatch.hidden;
    if (!box.hidden) map.draw();
  }, box);
  await show();
  return async () => {
    whichLabel.hidden = grid.exact;
    if (grid.exact) which.value = "high";
    await show();
  };
};

// What one cell holds, in words: the extremes of its range, and every column that was measured there.
/** @param {ParameterGrid} grid @param {Cells} cells */
const describeCell = (grid, { column, planes }, row, bucket) => {
  const at = row * grid.first.length + bucket;
  const rows = [[between(grid.first[bucket], grid.last[bucket]), grid.recorded[bucket] > 1 ? `${number(grid.recorded[bucket])} recorded` : ""]];
  const measured = grid.measured[column.series][at];
  const broken = grid.broken[column.series][at];
  if (!measured) rows.push([column.label, "not measured"]);
  else {
    const [low, high] = [planes.low[at], planes.high[at]];
    const shown = (value) => (column.scale === "share" ? `${number(100 * value, 4)} %` : number(value, grid.precise ? 6 : 3));
    const none = Number.isNaN(high) && Number.isNaN(low);
    const nothing = column.series === "update" && !broken ? "not defined: the weights were zero" : "no finite value";
    rows.push([column.label, none ? nothing : low === high ? shown(high) : `${shown(low)} to ${shown(high)}`]);
    if (measured < grid.recorded[bucket]) rows.push(["measured at", `${number(measured)} of ${number(grid.recorded[bucket])} steps`]);
    if (broken) rows.push(["NaN or Inf", grid.recorded[bucket] > 1 ? "in this range" : "at this step"]);
  }
  return { title: report.parameters[row].name, rows };
};

// The chosen parameter over steps, in a chart that stays while only its numbers change.
/** @param {HTMLElement} host @param {ParameterGrid} grid @param {Cells} cells @param {any} panel */
const showDetail = (host, grid, { column, planes }, panel) => {
  const { row } = view;
  const chart = (panel.detail ??= {});
  if (row === null) {
    fill(host, el("p", { class: "hint" }, "Choose a row, here or in the table below, to see its values over steps. Drag to zoom, double-click to see everything."));
    return;
  }
  const parameter = report.parameters[row];
  const amount = grid.first.length;
  const part = (values) => Float64Array.from(values.subarray(row * amount, (row + 1) * amount), (value) => (Number.isFinite(value) ? value : NaN));
  const measured = grid.measured[column.series].subarray(row * amount, (row + 1) * amount);
  const bad = grid.broken[column.series].subarray(row * amount, (row + 1) * amount);
  const places = [...measured.keys()];
  const odd = places.filter((i) => bad[i]);
  const recorded = grid.recordedAt(column.series);
  const breaks = { odd, gap: places.filter((i) => !measured[i] && recorded[i]), ...grid.gaps[column.series] };
  const log = column.scale === "log";
  const digits = grid.precise ? 6 : 3;
  /** @type {Line[]} */
  const lines = grid.exact
    ? [{ label: column.label, axis: "left", style: "line", tone: "first", values: part(planes.high), digits, ...breaks }]
    : [
        { label: "largest", axis: "left", style: "steps", tone: "first", values: part(planes.high), downTo: "smallest", digits, ...breaks },
        { label: "smallest", axis: "left", style: "steps", tone: "third", values: part(planes.low), digits, ...breaks, odd: [] },
      ];
  const facts = [parameter.shape, parameter.dtype, `${number(parameter.numel)} values`, parameter.module, parameter.group && `group ${parameter.group}`, parameter.aliases.length ? `also ${parameter.aliases.join(", ")}` : ""];
  const body = (panel.detailBox ??= el("div", {}));
  fill(
    host,
    el("div", { class: "detail-head" }, el("h3", {}, parameter.name), el("button", { type: "button", class: "quiet", onclick: () => view.set("row", null) }, "clear")),
    el("p", { class: "hint" }, facts.filter(Boolean).join(" · ")),
    body,
  );
  const empty = measured.some(Boolean) ? "" : `${column.label}: not measured. ${report.reasons[parameter.name] ?? ""}`;
  const left = { label: column.label, log, low: column.scale === "share" ? 0 : null, high: column.scale === "share" ? 1 : null };
  const steps = Float64Array.from(grid.first);
  const says = grid.exact ? null : (i) => between(grid.first[i], grid.last[i]);
  drawChart(body, { title: "", steps, lines, left, right: null, marks: [], overSteps: true, says, empty }, chart, 190);
};
