// The spread of the gradient's size over the depth of the model, and its value at a chosen step.

KINDS.depth = async (body, { spread }, state) => {
  const { grid } = view;
  const amount = report.parameters.length;
  const planes = await grid?.planes("rms");
  const { first, last } = grid ?? { first: [], last: [] }; // those of the planes: the grid may take newer ones
  /** @type {(label: string, values: Float64Array, style: string, colour: string, downTo?: string) => Line} */
  const line = (label, values, style, colour, downTo = "") => ({
    label, values, style, tone: colour, downTo, axis: "left", odd: [], gap: [...values.keys()].filter((row) => !Number.isFinite(values[row])),
  });
  const quantile = (place) => spread.subarray(place * amount, (place + 1) * amount);
  state.draw = () => {
    const bucket = Math.min(view.bucket ?? Infinity, first.length - 1);
    const chosen = Float64Array.from({ length: amount }, (_, row) => (planes ? planes.high[row * first.length + bucket] : NaN));
    drawChart(state.box, {
      title: "",
      steps: Float64Array.from({ length: amount }, (_, row) => row),
      lines: [
        line("smallest to largest", quantile(4), "edge", "eighth", "smallest"),
        line("smallest", quantile(0), "edge", "eighth"),
        line("middle 80 % of steps", quantile(3), "edge", "first", "lower tenth"),
        line("lower tenth", quantile(1), "edge", "first"),
        line("median", quantile(2), "line", "first"),
        { ...line("chosen step", chosen, "line", "fourth"), digits: grid?.precise ? 6 : 3 },
      ],
      left: { label: "rms (gradient)", log: true, low: null, high: null },
      right: null,
      marks: [],
      overSteps: false,
      xRange: () => [-0.5, amount - 0.5],
      xAxis: depthAxis(),
      says: (row) => report.parameters[row].name,
    }, (state.chart ??= {}), 280);
    if (!grid || !state.chart.plot) return;
    fill(
      state.controls,
      el("label", { for: "depth-step" }, "Chosen step"),
      el("input", { type: "range", id: "depth-step", min: "0", max: String(first.length - 1), step: "1", oninput: (event) => view.set("bucket", Number(event.target.value)) }),
      el("output", { for: "depth-step" }, between(first[bucket], last[bucket]) + (grid.exact ? "" : " (largest)")),
    );
    state.controls.querySelector("input").value = String(bucket);
  };
  if (!state.box) {
    Object.assign(state, { box: el("div"), controls: el("div", { class: "slider" }) });
    body.append(state.box, state.controls);
    view.on("bucket", () => state.draw(), state.controls);
  }
  state.draw();
};

// Names of the modules at the rows where they begin, as many as have room.
const depthAxis = () => ({
  ...stepAxis("parameter, in model order"),
  splits: (plot) => {
    const most = Math.max(1, Math.floor(plot.bbox.width / devicePixelRatio / 104));
    plot.depthLabels = new Map();
    let free = -Infinity;
    for (const { from: row, text } of namedRuns(report.parameters, ({ name }) => name.split("."), 6, most)) {
      const at = plot.valToPos(row, "x");
      if (at < free || at + 7 * Math.min(14, text.length) > plot.bbox.width / devicePixelRatio + 10) continue;
      plot.depthLabels.set(row, text);
      free = at + 104;
    }
    return [...plot.depthLabels.keys()];
  },
  values: (plot, splits) => splits.map((row) => ending(plot.depthLabels?.get(row) ?? "")),
  filter: (plot, splits) => splits,
  align: 1,
});

// Neighbours begin alike; what sets them apart is at the end.
const ending = (text) => (text.length <= 14 ? text : `…${text.slice(-13)}`);
