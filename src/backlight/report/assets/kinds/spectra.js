// The spectra of one layer at one step: a chooser of layers, a slider over steps, charts that follow both.

// An axis of logarithms: ticks are 1, 2 and 5 times powers of ten, as many as have room.
const decadeAxis = (label) => ({
  ...stepAxis(label),
  splits: (plot, axis, low, high) => {
    const most = Math.max(2, plot.bbox.width / devicePixelRatio / 62);
    const between = (times) => {
      const ticks = [];
      for (let exponent = Math.floor(low) - 1; exponent <= high; exponent += 1) for (const each of times) ticks.push(exponent + Math.log10(each));
      return ticks.filter((value) => value >= low && value <= high);
    };
    const powers = between([1]);
    const finer = [between([1, 2, 5]), powers].find((ticks) => ticks.length <= most);
    if (finer && finer.length > 1) return finer;
    return powers.length > most ? powers.filter((_, i) => i % Math.ceil(powers.length / most) === 0) : [low, (low + high) / 2, high];
  },
  filter: (plot, splits) => splits,
  values: (plot, splits) => splits.map((value) => number(10 ** value, 2)),
});

const padded = ([low, high]) => (low < high ? [low - 0.03 * (high - low), high + 0.03 * (high - low)] : [low - 0.5, high + 0.5]);

// One layer: the field of a step is a row of the table.
class LayerTables {
  /** @param {LayerData} layer @param {SpectraData} names */
  constructor(layer, { fields, values, numbers }) {
    this.data = layer;
    this.names = { fields, values, numbers };
  }

  // A column of a chart, as monitors/spectra/charts.py names it.
  column(step, column) {
    const { data, names } = this;
    const [name, whole] = column.split(" / ");
    if (whole) {
      const top = Math.max(0, ...this.column(step, whole).filter(Number.isFinite));
      return this.column(step, name).map((value) => (top > 0 ? value / top : NaN));
    }
    if (name === "ranks" || name === "directions") return Float64Array.from(data[name], (place) => place + 1);
    if (name === "edge") return new Float64Array(data.ranks.length).fill(this.figures(step).edge);
    if (name === "one") return new Float64Array(data.directions.length).fill(1);
    const row = (table, rows, width) => table.subarray((step * rows.length + rows.indexOf(name)) * width, (step * rows.length + rows.indexOf(name) + 1) * width);
    return names.values.includes(name) ? row(data.spectrum, names.values, data.ranks.length) : row(data.table, names.fields, data.directions.length);
  }

  figures(step) {
    const { numbers } = this.names;
    return Object.fromEntries(numbers.map((name, i) => [name, this.data.figures[step * numbers.length + i]]));
  }

  // The range of columns over all steps, so that nothing jumps while the slider moves.
  extent(take) {
    let [low, high] = [Infinity, -Infinity];
    for (let step = 0; step < this.data.steps.length; step += 1) {
      for (const values of take(step)) {
        for (const value of values) {
          if (!Number.isFinite(value)) continue;
          if (value < low) low = value;
          if (value > high) high = value;
        }
      }
    }
    return [low, high];
  }
}

// What is further below the largest is zero but for rounding, and would squeeze the rest into a corner.
const DECADES_ACROSS = 3;
const DECADES_UP = 5;

const logOf = (values) => Array.from(values, (value) => (value > 0 ? Math.log10(value) : NaN));

// The lines of a chart, its band first: label, style, tone, column, and the label of the line that a band is filled down to.
/** @type {(chart: SpectraChart) => string[][]} */
const linesOf = ({ band, lines }) => [...(band ? [[band[0], "edge", band[1], band[3], "lower end"], ["lower end", "edge", band[1], band[2]]] : []), ...lines];

/** The ends of both axes over all steps of a layer. @param {SpectraChart} chart @param {LayerTables} layer */
const endsOf = (chart, layer) => {
  const scaled = (step, column, log) => (log ? logOf(layer.column(step, column)) : layer.column(step, column));
  const [first, last] = layer.extent((step) => [scaled(step, chart.x, chart.log_x)]);
  const across = padded([chart.log_x ? Math.max(first, last - DECADES_ACROSS) : first, last]);
  let [low, high] = layer.extent((step) => linesOf(chart).map(([, , , column]) => scaled(step, column, chart.log_y)));
  if (chart.log_y) low = Math.max(low, high - DECADES_UP);
  const room = 0.04 * (high - low) + 0.02;
  const powers = Number.isFinite(low) ? [10 ** (low - room), 10 ** (high + room)] : [0.1, 10];
  const fixed = chart.log_y ? powers : [Math.min(-0.02, Math.max(-0.5, low)), Math.max(1.03, Math.min(1.5, high))];
  return { range: across.every(Number.isFinite) ? across : [0, 1], fixed };
};

/**
 * One chart of a layer at a step, with the ends that it has at all steps.
 * @param {SpectraChart} chart @param {LayerTables} layer @param {number} step @param {{ range: number[], fixed: number[] }} ends
 * @returns {Spec}
 */
const spectraSpec = (chart, layer, step, { range, fixed }) => {
  const xs = chart.log_x ? logOf(layer.column(step, chart.x)) : layer.column(step, chart.x);
  const order = [...xs.keys()].filter((i) => Number.isFinite(xs[i])).sort((a, b) => xs[a] - xs[b]);
  const steps = order.map((i) => xs[i]);
  const lines = linesOf(chart).map(([label, style, colour, column, downTo = ""]) => {
    const all = layer.column(step, column);
    const values = order.map((i) => all[i]);
    const gap = [...values.keys()].filter((place) => !Number.isFinite(values[place]));
    return { label, style, tone: colour, downTo, axis: /** @type {const} */ ("left"), values, odd: [], gap, digits: 4 };
  });
  const edge = Math.log10(layer.figures(step).edge);
  return {
    title: chart.title,
    steps,
    lines,
    left: { label: chart.up, log: chart.log_y, low: null, high: null, fixed },
    right: null,
    marks: [],
    spans: chart.log_x && Number.isFinite(edge) ? [{ label: "", mark: "edge", after: edge, by: edge, tone: "limit" }] : [],
    overSteps: false,
    xRange: () => range,
    xAxis: chart.log_x ? decadeAxis(chart.across) : stepAxis(chart.across),
    says: (place) => `${chart.across} ${number(chart.log_x ? 10 ** steps[place] : steps[place], 4)}`,
    empty: lines.some(({ style, values }) => style === "line" && values.some(Number.isFinite)) ? "" : "Nothing here was measured at this step.",
  };
};

KINDS.spectra = (body, data, state) => {
  state.layers = data.layers.map((layer) => new LayerTables(layer, data));
  if (state.open) return state.open(view.layer ?? data.layers[0].name);
  const choice = el(
    "select",
    { id: "spectra-layer", onchange: () => view.set("layer", choice.value) },
    data.layers.map(({ name, shape }) => el("option", { value: name }, `${name} · ${shape}`)),
  );
  const readout = el("output", { for: "spectra-step" });
  const slide = () => {
    stop();
    show(Number(slider.value));
  };
  const slider = el("input", { type: "range", id: "spectra-step", min: "0", step: "1", oninput: slide });
  const play = el("button", { type: "button", class: "quiet", id: "spectra-play", onclick: () => (timer === null ? start() : stop()) }, "Play");
  const readouts = factList([], { id: "spectra-figures" });
  const box = el("div", { class: "small-charts" });
  body.append(
    el("div", { class: "controls" }, el("label", { for: "spectra-layer" }, "Layer ", choice), el("div", { class: "slider" }, el("label", { for: "spectra-step" }, "Step"), slider, readout), play),
    readouts,
    box,
  );
  const charts = data.charts.map((chart) => ({ chart, host: box.appendChild(el("div", {})), state: {}, ends: null }));
  let layer = null;
  let steps = [];
  let at = 0;
  let timer = null;
  const start = () => {
    if (steps.length < 2) return;
    if (at === steps.length - 1) show(0);
    play.textContent = "Stop";
    timer = setInterval(() => (at + 1 < steps.length ? show(at + 1) : stop()), 600);
  };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  };
  const show = (step) => {
    at = step;
    const figures = layer.figures(step);
    slider.value = String(step);
    readout.textContent = `step ${number(steps[step])}`;
    slider.setAttribute("aria-valuetext", readout.textContent);
    fill(readouts, ...factList(data.labels.map(([name, label]) => ({ label, value: Number.isNaN(figures[name]) ? "not measured" : number(figures[name], 3) }))).childNodes);
    for (const { chart, host, state: drawn, ends } of charts) drawChart(host, spectraSpec(chart, layer, step, ends), drawn, 250);
  };
  const nearest = (step) => steps.reduce((best, value, i) => (Math.abs(value - step) < Math.abs(steps[best] - step) ? i : best), 0);
  state.open = (name) => {
    const next = state.layers.find((each) => each.data.name === name);
    if (!next) return;
    stop();
    const before = steps[at];
    layer = next;
    steps = layer.data.steps;
    choice.value = name;
    slider.max = String(steps.length - 1);
    slider.disabled = play.disabled = steps.length < 2;
    for (const each of charts) each.ends = endsOf(each.chart, layer);
    show(before === undefined ? steps.length - 1 : nearest(before));
    body.dataset.layer = name;
  };
  view.on("layer", () => state.open(view.layer), box);
  view.on("row", () => (view.row === null ? null : state.open(report.parameters[view.row].name)), box);
  view.on("focus", () => (view.focus === null || !layer ? null : show(nearest(view.focus))), box);
  state.open(data.layers[0].name);
};
