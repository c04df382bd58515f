// The spectra of one layer at one step: a chooser of layers, a slider over steps, charts that follow both.

// An axis of logarithms: ticks are 1, 2 and 5 times powers of ten, as many as have room.
const decadeAxis = (label) => ({
  ...stepAxis(label),
  splits: (plot, axis, low, high) => {
    const most = Math.max(2, plot.bbox.width / devicePixelRatio / 62);
    const between = (times) => {
      const found = [];
      for (let exponent = Math.floor(low) - 1; exponent <= high; exponent += 1) for (const each of times) found.push(exponent + Math.log10(each));
      return found.filter((value) => value >= low && value <= high);
    };
    const powers = between([1]);
    const finer = [between([1, 2, 5]), powers].find((found) => found.length <= most);
    if (finer && finer.length > 1) return finer;
    return powers.length > most ? powers.filter((_, i) => i % Math.ceil(powers.length / most) === 0) : [low, (low + high) / 2, high];
  },
  filter: (plot, splits) => splits,
  values: (plot, splits) => splits.map((value) => number(10 ** value, 2)),
});

const padded = ([low, high]) => (low < high ? [low - 0.03 * (high - low), high + 0.03 * (high - low)] : [low - 0.5, high + 0.5]);

// What one layer holds, unpacked: the field of a step is a row of the table.
class LayerTables {
  constructor(layer, fields, values, parts) {
    Object.assign(this, layer, parts);
    this.places = Object.fromEntries(fields.map((name, i) => [name, i]));
    this.kinds = values;
    this.amount = fields.length;
  }

  field(step, name) {
    const K = this.directions.length;
    const from = (step * this.amount + this.places[name]) * K;
    return this.table.subarray(from, from + K);
  }

  values(step, name) {
    const J = this.ranks.length;
    const from = (step * this.kinds.length + this.kinds.indexOf(name)) * J;
    return this.spectrum.subarray(from, from + J);
  }

  // The range of fields over all steps, so that nothing jumps while the slider moves.
  extent(take) {
    let [low, high] = [Infinity, -Infinity];
    for (let step = 0; step < this.steps.length; step += 1) {
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
  const top = values.reduce((most, value) => (value > most ? value : most), 0);
  return [values, ...others].map((each) => Array.from(each, (value) => (top > 0 ? value / top : NaN)));
};

// Charts by direction or by singular value. `columns` gives, for a step, the values of each line.
const SPECTRA_CHARTS = [
  {
    title: "Singular values of the replicates",
    across: "rank",
    left: { label: "singular value", log: true, low: null, high: null },
    lines: [["smallest to largest", "edge", "first", "smallest"], ["smallest", "edge", "first"], ["median over the replicates", "line", "first"], ["noise edge", "dashed", "limit"]],
    x: (layer) => Array.from(layer.ranks, (rank) => rank + 1),
    columns: (layer, step, figures) => [
      layer.values(step, "largest"), layer.values(step, "smallest"), layer.values(step, "median"), Array.from(layer.ranks, () => figures.edge),
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
    x: (layer) => Array.from(layer.directions, (direction) => direction + 1),
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
    x: (layer) => Array.from(layer.directions, (direction) => direction + 1),
    columns: (layer, step) => [layer.field(step, "gap"), layer.field(step, "strength_gap"), Array.from(layer.directions, () => 1)],
  },
];

// A chart that is filled anew for each layer and step.
class SpectraChart {
  constructor(host, kind) {
    this.kind = kind;
    this.range = [0, 1];
    this.box = el("div", {});
    host.append(this.box);
    const lines = kind.lines.map(([label, style, colour, downTo]) => ({
      label, style, tone: colour, downTo: downTo ?? "", axis: "left", values: [0.5, 0.5], odd: [], gap: [], digits: 4,
    }));
    const shown = (value) => `${kind.across} ${number(kind.decades ? 10 ** value : value, 4)}`;
    this.left = { ...kind.left, fixed: () => this.height };
    this.spec = {
      title: kind.title, steps: [0, 1], lines, left: this.left, right: null, marks: [], spans: [], overSteps: false,
      xRange: () => [...this.range],
      xAxis: kind.decades ? decadeAxis(kind.across) : stepAxis(kind.across),
      says: (place) => shown(this.spec.steps[place]),
    };
    this.height = [0.1, 10]; // until a layer is chosen
    this.plot = drawChart(this.box, this.spec, 250);
    this.empty = el("p", { class: "empty", hidden: true }, "Nothing here was measured at this step.");
    this.box.append(this.empty);
  }

  // The ranges of both axes over all steps of a layer.
  choose(layer, figuresAt) {
    const { kind } = this;
    const columns = (step) => kind.columns(layer, step, figuresAt(step));
    const [first, last] = layer.extent((step) => [kind.x(layer, step)]);
    this.range = padded([kind.decades ? Math.max(first, last - DECADES_ACROSS) : first, last]);
    if (!this.range.every(Number.isFinite)) this.range = [0, 1];
    let [low, high] = layer.extent((step) => columns(step).map((values) => (kind.left.log ? logOf(values) : values)));
    if (kind.left.log) low = Math.max(low, high - DECADES_UP);
    if (kind.left.log) this.height = Number.isFinite(low) ? [10 ** (low - 0.04 * (high - low) - 0.02), 10 ** (high + 0.04 * (high - low) + 0.02)] : [0.1, 10];
    else this.height = [Math.min(-0.02, Math.max(-0.5, low)), Math.max(1.03, Math.min(1.5, high))];
  }

  show(layer, step, figures) {
    const xs = this.kind.x(layer, step);
    const order = [...xs.keys()].filter((i) => Number.isFinite(xs[i])).sort((a, b) => xs[a] - xs[b]);
    const columns = this.kind.columns(layer, step, figures).map((values) => order.map((i) => values[i]));
    const has = columns.some((values, i) => this.spec.lines[i].style === "line" && values.some(Number.isFinite));
    const plotBox = this.box.querySelector(".plot");
    plotBox.hidden = !has;
    this.empty.hidden = has;
    this.spec.steps = order.map((i) => xs[i]);
    this.spec.lines.forEach((line, i) => {
      line.values = columns[i];
      line.gap = [...columns[i].keys()].filter((place) => !Number.isFinite(columns[i][place]));
    });
    this.spec.spans = this.kind.decades && figures.edge > 0 ? [{ label: "", mark: "edge", after: Math.log10(figures.edge), by: Math.log10(figures.edge), tone: "limit" }] : [];
    this.plot.setData(dataOf(this.spec), true);
  }
}

const SPECTRA_FIGURES = [
  ["replicates", "replicates"], ["batch", "samples in each"], ["noise_sigma", "noise level"], ["edge", "noise edge"], ["signal_share", "signal share"],
  ["noise_scale", "noise scale"], ["identifiable", "identifiable"], ["stable_rank_gradient", "stable rank, gradient"], ["stable_rank_weight", "stable rank, weight"],
];

KINDS.spectra = async (host, { fields, values, numbers, layers }) => {
  for (const layer of layers) layer.steps = await unpack(layer.steps);
  return async () => {
    const choice = el(
      "select",
      { id: "spectra-layer", onchange: () => view.set("layer", choice.value) },
      layers.map(({ name, shape }) => el("option", { value: name }, `${name} · ${shape}`)),
    );
    const readout = el("output", { for: "spectra-step" });
    const slider = el("input", { type: "range", id: "spectra-step", min: "0", step: "1", oninput: () => (stop(), show(Number(slider.value))) });
    const play = el("button", { type: "button", class: "quiet", id: "spectra-play", onclick: () => (timer === null ? start() : stop()) }, "Play");
    const readouts = el("dl", { class: "facts", id: "spectra-figures" });
    const box = el("div", { class: "small-charts" });
    host.append(
      el("div", { class: "controls" }, el("label", { for: "spectra-layer" }, "Layer ", choice), el("div", { class: "slider" }, el("label", { for: "spectra-step" }, "Step"), slider, readout), play),
      readouts,
      box,
    );
    const charts = SPECTRA_CHARTS.map((kind) => new SpectraChart(box, kind));
    const opened = new Map();
    let layer = null;
    let at = 0;
    let timer = null;
    const figuresAt = (step) => Object.fromEntries(numbers.map((name, i) => [name, layer.figures[step * numbers.length + i]]));
    const start = () => {
      if (layer.steps.length < 2) return;
      if (at === layer.steps.length - 1) show(0);
      play.textContent = "Stop";
      timer = setInterval(() => (at + 1 < layer.steps.length ? show(at + 1) : stop()), 600);
    };
    const stop = () => {
      clearInterval(timer);
      timer = null;
      play.textContent = "Play";
    };
    const show = (step) => {
      at = step;
      const figures = figuresAt(step);
      slider.value = String(step);
      readout.textContent = `step ${number(layer.steps[step])}`;
      slider.setAttribute("aria-valuetext", readout.textContent);
      readouts.replaceChildren(
        ...SPECTRA_FIGURES.map(([name, label]) => el("div", {}, el("dt", {}, label), el("dd", {}, Number.isNaN(figures[name]) ? "not measured" : number(figures[name], 3)))),
      );
      for (const chart of charts) chart.show(layer, step, figures);
    };
    const nearest = (step) => layer.steps.reduce((best, value, i) => (Math.abs(value - step) < Math.abs(layer.steps[best] - step) ? i : best), 0);
    const open = async (name) => {
      const found = layers.find((each) => each.name === name);
      if (!found) return;
      stop();
      if (!opened.has(name)) {
        const parts = { directions: await unpack(found.directions), ranks: await unpack(found.ranks), figures: await unpack(found.figures), table: await unpack(found.table), spectrum: await unpack(found.spectrum) };
        opened.set(name, new LayerTables(found, fields, values, parts));
      }
      const before = layer?.steps[at];
      layer = opened.get(name);
      choice.value = name;
      slider.max = String(layer.steps.length - 1);
      slider.disabled = play.disabled = layer.steps.length < 2;
      for (const chart of charts) chart.choose(layer, figuresAt);
      show(before === undefined ? layer.steps.length - 1 : nearest(before));
      host.dataset.layer = name;
    };
    view.on("layer", () => open(view.layer), box);
    view.on("row", () => (view.row === null ? null : open(report.parameters[view.row].name)), box);
    view.on("focus", () => (view.focus === null || !layer ? null : show(nearest(view.focus))), box);
    await open(layers[0].name);
  };
};
