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

  field(step, name) {
    const { fields } = this.names;
    const K = this.data.directions.length;
    const from = (step * fields.length + fields.indexOf(name)) * K;
    return this.data.table.subarray(from, from + K);
  }

  values(step, name) {
    const { values } = this.names;
    const J = this.data.ranks.length;
    const from = (step * values.length + values.indexOf(name)) * J;
    return this.data.spectrum.subarray(from, from + J);
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

const share = (values, ...others) => {
  const top = Math.max(0, ...values.filter(Number.isFinite));
  return [values, ...others].map((each) => Array.from(each, (value) => (top > 0 ? value / top : NaN)));
};

// Charts by direction or by singular value. `columns` gives, for a step, the values of each line.
/** @type {SpectraKind[]} */
const SPECTRA_CHARTS = [
  {
    title: "Singular values of the replicates",
    across: "rank",
    left: { label: "singular value", log: true, low: null, high: null },
    lines: [["smallest to largest", "edge", "first", "smallest"], ["smallest", "edge", "first"], ["median over the replicates", "line", "first"], ["noise edge", "dashed", "limit"]],
    x: (layer) => Array.from(layer.data.ranks, (rank) => rank + 1),
    columns: (layer, step, figures) => [
      layer.values(step, "largest"), layer.values(step, "smallest"), layer.values(step, "median"), Array.from(layer.data.ranks, () => figures.edge),
    ],
  },
  {
    title: "Echo against singular value",
    across: "singular value",
    decades: true,
    left: { label: "spectral echo", log: false, low: 0, high: 1 },
    lines: [["interval over replicates", "edge", "first", "lower"], ["lower", "edge", "first"], ["echo", "line", "first"], ["pooled echo", "line", "second"], ["residual (1: contradicted)", "dashed", "fourth"], ["null (95 % of chance)", "dashed", "limit"], ["spiked model", "dashed", "eighth"], ["echo of the block", "dashed", "third"]],
    x: (layer, step) => logOf(layer.field(step, "singular_value")),
    columns: (layer, step) => ["echo_high", "echo_low", "echo", "pooled", "residual", "echo_null", "expected", "block_echo"].map((name) => layer.field(step, name)),
  },
  {
    title: "Left and right alignment with the mean of the other replicates",
    across: "direction",
    left: { label: "overlap", log: false, low: 0, high: 1 },
    lines: [["left", "line", "first"], ["right", "line", "second"], ["ambiguity (best less second best)", "dashed", "eighth"]],
    x: (layer) => Array.from(layer.data.directions, (direction) => direction + 1),
    columns: (layer, step) => ["left_alignment", "right_alignment", "ambiguity"].map((name) => layer.field(step, name)),
  },
  {
    title: "What to make of a singular value",
    across: "singular value",
    decades: true,
    left: { label: "share of its largest", log: false, low: 0, high: 1 },
    lines: [["interval over replicates", "edge", "third", "lower"], ["lower", "edge", "third"], ["recommended by the data (no model)", "line", "third"], ["recommended (spiked model)", "line", "first"], ["Muon's iteration", "line", "fourth"], ["left as it is", "dashed", "eighth"]],
    x: (layer, step) => logOf(layer.field(step, "singular_value")),
    columns: (layer, step) => {
      const at = (name) => layer.field(step, name);
      const [data, high, low] = share(at("unbiased"), at("unbiased_high"), at("unbiased_low"));
      return [high, low, data, ...share(at("shrunk")), ...share(at("muon")), ...share(at("singular_value"))];
    },
  },
  {
    title: "Gap to the next direction",
    across: "direction",
    left: { label: "gap / noise level", log: true, low: null, high: null },
    lines: [["as observed", "line", "first"], ["without noise (spiked model)", "line", "third"], ["noise joins what is closer", "dashed", "limit"]],
    x: (layer) => Array.from(layer.data.directions, (direction) => direction + 1),
    columns: (layer, step) => [layer.field(step, "gap"), layer.field(step, "strength_gap"), Array.from(layer.data.directions, () => 1)],
  },
];

// The ends of both axes over all steps of a layer.
/** @param {SpectraKind} kind @param {LayerTables} layer */
const endsOf = (kind, layer) => {
  const [first, last] = layer.extent((step) => [kind.x(layer, step)]);
  const across = padded([kind.decades ? Math.max(first, last - DECADES_ACROSS) : first, last]);
  const up = (values) => (kind.left.log ? logOf(values) : values);
  let [low, high] = layer.extent((step) => kind.columns(layer, step, layer.figures(step)).map(up));
  if (kind.left.log) low = Math.max(low, high - DECADES_UP);
  const room = 0.04 * (high - low) + 0.02;
  const powers = Number.isFinite(low) ? [10 ** (low - room), 10 ** (high + room)] : [0.1, 10];
  const fixed = kind.left.log ? powers : [Math.min(-0.02, Math.max(-0.5, low)), Math.max(1.03, Math.min(1.5, high))];
  return { range: across.every(Number.isFinite) ? across : [0, 1], fixed };
};

// One chart of a layer at a step, with the ends that it has at all steps.
/** @type {(kind: SpectraKind, layer: LayerTables, step: number, ends: { range: number[], fixed: number[] }) => Spec} */
const spectraChart = (kind, layer, step, { range, fixed }) => {
  const figures = layer.figures(step);
  const xs = kind.x(layer, step);
  const order = [...xs.keys()].filter((i) => Number.isFinite(xs[i])).sort((a, b) => xs[a] - xs[b]);
  const columns = kind.columns(layer, step, figures).map((values) => order.map((i) => values[i]));
  const steps = order.map((i) => xs[i]);
  const edge = Math.log10(figures.edge);
  const measured = columns.some((values, i) => kind.lines[i][1] === "line" && values.some(Number.isFinite));
  return {
    title: kind.title,
    steps,
    lines: kind.lines.map(([label, style, colour, downTo = ""], i) => ({
      label, style, tone: colour, downTo, axis: "left", values: columns[i], odd: [], digits: 4,
      gap: [...columns[i].keys()].filter((place) => !Number.isFinite(columns[i][place])),
    })),
    left: { ...kind.left, fixed },
    right: null,
    marks: [],
    spans: kind.decades && figures.edge > 0 ? [{ label: "", mark: "edge", after: edge, by: edge, tone: "limit" }] : [],
    overSteps: false,
    xRange: () => range,
    xAxis: kind.decades ? decadeAxis(kind.across) : stepAxis(kind.across),
    says: (place) => `${kind.across} ${number(kind.decades ? 10 ** steps[place] : steps[place], 4)}`,
    empty: measured ? "" : "Nothing here was measured at this step.",
  };
};

const SPECTRA_FIGURES = [
  ["replicates", "replicates"], ["batch", "samples in each"], ["noise_sigma", "noise level"], ["edge", "noise edge"], ["signal_share", "signal share"],
  ["noise_scale", "noise scale"], ["identifiable", "identifiable"], ["stable_rank_gradient", "stable rank, gradient"], ["stable_rank_weight", "stable rank, weight"],
];

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
  const charts = SPECTRA_CHARTS.map((kind) => ({ kind, host: box.appendChild(el("div", {})), state: {}, ends: null }));
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
    fill(readouts, ...factList(SPECTRA_FIGURES.map(([name, label]) => ({ label, value: Number.isNaN(figures[name]) ? "not measured" : number(figures[name], 3) }))).childNodes);
    for (const chart of charts) drawChart(chart.host, spectraChart(chart.kind, layer, step, chart.ends), chart.state, 250);
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
    for (const chart of charts) chart.ends = endsOf(chart.kind, layer);
    show(before === undefined ? steps.length - 1 : nearest(before));
    body.dataset.layer = name;
  };
  view.on("layer", () => state.open(view.layer), box);
  view.on("row", () => (view.row === null ? null : state.open(report.parameters[view.row].name)), box);
  view.on("focus", () => (view.focus === null || !layer ? null : show(nearest(view.focus))), box);
  state.open(data.layers[0].name);
};
