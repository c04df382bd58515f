// The spread of the gradient's size over the depth of the model, and its value at a chosen step.

KINDS.depth = async (host, { spread: packed }) => {
  const spread = await unpack(packed);
  const amount = report.parameters.length;
  const quantile = (place) => spread.subarray(place * amount, (place + 1) * amount);
  return async () => {
    const grid = await view.grid;
    const rows = Float64Array.from({ length: amount }, (_, row) => row);
    const chosen = new Float64Array(amount).fill(NaN);
    const line = (label, values, style, colour, downTo = "") => ({
      label, values, style, tone: colour, downTo, axis: "left", odd: [], gap: [...values.keys()].filter((row) => !Number.isFinite(values[row])),
    });
    const at = { ...line("chosen step", chosen, "line", "fourth"), digits: grid?.precise ? 6 : 3 };
    const spec = {
      title: "",
      steps: rows,
      lines: [
        line("smallest to largest", quantile(4), "edge", "eighth", "smallest"),
        line("smallest", quantile(0), "edge", "eighth"),
        line("middle 80 % of steps", quantile(3), "edge", "first", "lower tenth"),
        line("lower tenth", quantile(1), "edge", "first"),
        line("median", quantile(2), "line", "first"),
        at,
      ],
      left: { label: "rms (gradient)", log: true, low: null, high: null },
      right: null,
      marks: [],
      overSteps: false,
      xRange: () => [-0.5, amount - 0.5],
      xAxis: depthAxis(),
      says: (row) => report.parameters[row].name,
    };
    const plot = drawChart(host, spec, 280);
    if (!plot || !grid) return;
    const readout = el("output", { for: "depth-step" });
    const slider = el("input", {
      type: "range", id: "depth-step", min: "0", max: String(grid.first.length - 1), step: "1",
      oninput: () => view.set("bucket", Number(slider.value)),
    });
    host.append(el("div", { class: "slider" }, el("label", { for: "depth-step" }, "Chosen step"), slider, readout));
    const { high } = await grid.planes("rms");
    const show = () => {
      const bucket = Math.min(view.bucket ?? Infinity, grid.first.length - 1);
      slider.max = String(grid.first.length - 1);
      slider.value = String(bucket);
      readout.textContent = between(grid.first[bucket], grid.last[bucket]) + (grid.exact ? "" : " (largest)");
      for (let row = 0; row < amount; row += 1) chosen[row] = high[row * grid.first.length + bucket];
      at.gap = [...chosen.keys()].filter((row) => !Number.isFinite(chosen[row]));
      plot.setData(dataOf(spec), true);
    };
    view.on("bucket", show, slider);
    show();
  };
};

// Names of the modules at the rows where they begin, as many as have room.
const depthAxis = () => ({
  ...stepAxis("parameter, in model order"),
  splits: (plot) => {
    const most = Math.max(1, Math.floor(plot.bbox.width / devicePixelRatio / 104));
    let best = [];
    for (let depth = 1; depth <= 6; depth += 1) {
      const starts = groupStarts(depth);
      if (best.length > 3 && starts.length > most) break; // those without room are left out below
      best = starts;
    }
    plot.depthLabels = new Map();
    let free = -Infinity;
    for (const { row, text } of best) {
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

const groupStarts = (depth) => {
  const found = [];
  report.parameters.forEach(({ name }, row) => {
    const text = name.split(".").slice(0, depth).join(".");
    if (!found.length || found.at(-1).text !== text) found.push({ row, text });
  });
  return found;
};
