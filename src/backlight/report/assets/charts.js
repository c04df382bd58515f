// Line charts over steps, on uPlot: one look, one range of steps, a legend that names what is under the cursor.

// What charts tell one another: where the pointer is, not what it does; the range of steps is the view's.
const FOLLOWED = new Set(["mousemove", "mouseleave"]);

const DASH = { dashed: [7, 5] };
// A line that runs over others: what is beneath it shows in its gaps.
const OVER = [undefined, [7, 5], [2, 4]];

const axisFont = () => `12px ${css("font")}`;

// Values as uPlot wants them: undefined where a line has no point here, null where a point cannot be drawn.
const drawable = (line, log) => {
  const breaks = new Set([...line.odd, ...(line.gap ?? [])]);
  return Array.from(line.values, (value, i) => {
    if (breaks.has(i)) return null;
    if (Number.isNaN(value)) return undefined;
    return log && value <= 0 ? null : value;
  });
};

// The ticks of a logarithmic axis that are worth a line and a label: whole powers, thinned out where they are
// many; the numbers between them where there are too few.
const logSplits = (base) => (plot, axis, low, high) => {
  const room = Math.max(2, Math.floor(plot.bbox.height / devicePixelRatio / 30));
  const [from, to] = [Math.log(low) / Math.log(base), Math.log(high) / Math.log(base)];
  const every = Math.max(1, Math.ceil((to - from) / room));
  const powers = [];
  for (let exponent = Math.ceil(from - 1e-9); exponent <= to + 1e-9; exponent += 1) if (exponent % every === 0) powers.push(base ** exponent);
  if (powers.length > 1) return powers;
  const between = [];
  for (let exponent = Math.floor(from); exponent <= to; exponent += 1) for (const times of [1, 2, 5]) between.push(times * base ** exponent);
  const inside = between.filter((value) => value >= low && value <= high);
  return inside.length > 1 ? inside : [low, (low + high) / 2, high];
};

const axisRange = (axis) => {
  const { log, low, high } = axis;
  if (axis.fixed) return () => axis.fixed();
  if (log) {
    return (plot, min, max) => {
      if (!(min > 0)) return [0.1, 10];
      const room = Math.max(1.15, (max / min) ** 0.05);
      return [min / room, max * room];
    };
  }
  return (plot, min, max) => {
    if (axis.top) return [low ?? 0, axis.top]; // read anew at each drawing, for a reader may lift it
    if (min === null) return [low ?? 0, high ?? 1];
    const room = (max - min || Math.abs(max) || 1) * 0.06;
    const from = low === null ? min - room : Math.min(low, min);
    const to = high === null ? max + room : Math.max(high, max);
    return [low === null ? from : from - (high === null ? 0 : (to - from) * 0.02), high === null ? to : to + (to - from) * 0.02];
  };
};

const verticalAxis = (axis, scale, side) => ({
  scale,
  side,
  label: axis.label || undefined,
  labelSize: axis.label ? 22 : 0,
  labelFont: axisFont(),
  font: axisFont(),
  size: (plot, values) => {
    const widest = Math.max(0, ...(values ?? []).map((value) => String(value ?? "").length));
    return Math.max(34, 14 + widest * 7);
  },
  stroke: () => css("ink-soft"),
  ticks: { show: false },
  grid: side === 3 ? { stroke: () => css("line"), width: 1, filter: (plot, splits) => splits } : { show: false },
  space: 28,
  ...(axis.log ? { splits: logSplits(axis.base ?? 10), filter: (plot, splits) => splits } : {}),
  values: (plot, splits, index, space, increment) => {
    // As many digits as tell one tick from the next.
    const digits = Math.max(4, Math.ceil(Math.log10(Math.max(...splits.map(Math.abs)) / increment)) + 1);
    return splits.map((value) => (axis.log && (axis.base ?? 10) === 10 ? logTick(value) : number(value, axis.log ? 4 : digits)));
  },
});

const stepAxis = (label = "step") => ({
  label: label || undefined,
  labelSize: label ? 20 : 0,
  labelFont: axisFont(),
  font: axisFont(),
  stroke: () => css("ink-soft"),
  size: 28,
  gap: 4,
  grid: { show: false },
  ticks: { stroke: () => css("line-strong"), width: 1, size: 4 },
  space: 64,
  incrs: [1, 2, 5].flatMap((times) => [...Array(12).keys()].map((zeros) => times * 10 ** zeros)).sort((a, b) => a - b),
  values: (plot, splits) => splits.map((value) => number(Math.round(value))),
});

// Steps that findings name, each with the worst finding there: findings come worst first.
const findingsAt = () => {
  const found = new Map();
  for (const finding of report.findings) if (finding.step !== null && !found.has(finding.step)) found.set(finding.step, finding);
  return found;
};

const hasFindings = ({ overSteps, across = "step" }) => overSteps && across === "step";

// A finding at a step: a triangle that stands on the axis.
const marker = (context, x, bottom, size, severity) => {
  context.fillStyle = css(severity);
  context.beginPath();
  context.moveTo(x, bottom - 1.6 * size);
  context.lineTo(x - size, bottom);
  context.lineTo(x + size, bottom);
  context.fill();
};

// What lines cannot show: a restart, the step in focus, findings, values that are not finite, marked steps.
const annotate = (plot, spec) => {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  const x = (step) => Math.round(plot.valToPos(step, "x", true)) + 0.5;
  const within = (step) => step >= plot.scales.x.min && step <= plot.scales.x.max;
  const upright = (step, colour, dash) => {
    ctx.strokeStyle = colour;
    ctx.lineWidth = ratio;
    ctx.setLineDash(dash.map((length) => length * ratio));
    ctx.beginPath();
    ctx.moveTo(x(step), bbox.top);
    ctx.lineTo(x(step), bbox.top + bbox.height);
    ctx.stroke();
    ctx.setLineDash([]);
  };
  const wedge = (step, colour) => {
    ctx.fillStyle = colour;
    ctx.beginPath();
    ctx.moveTo(x(step), bbox.top + 9 * ratio);
    ctx.lineTo(x(step) - 5 * ratio, bbox.top);
    ctx.lineTo(x(step) + 5 * ratio, bbox.top);
    ctx.fill();
  };
  ctx.save();
  const { min, max } = plot.scales.x;
  for (const span of spec.spans ?? []) {
    if (span.by < min || span.after > max) continue;
    const [from, to] = [x(Math.max(span.after, min)), x(Math.min(span.by, max))];
    const width = Math.max(2 * ratio, to - from);
    ctx.fillStyle = faded(tone(span.tone), 0.35);
    ctx.fillRect(to - width, bbox.top, width, bbox.height);
    ctx.fillStyle = tone(span.tone);
    ctx.font = `${12 * ratio}px ${css("font")}`;
    const right = to + 4 * ratio + ctx.measureText(span.mark).width > bbox.left + bbox.width;
    ctx.textAlign = right ? "right" : "left";
    ctx.fillText(span.mark, right ? to - width - 4 * ratio : to + 4 * ratio, bbox.top + 12 * ratio);
  }
  if (spec.overSteps) {
    for (const step of report.attempts) if (within(step)) upright(step, css("ink-faint"), [2, 4]);
    if (view.focus !== null && within(view.focus)) upright(view.focus, css("accent"), []);
    for (const [step, { severity }] of hasFindings(spec) ? findingsAt() : []) {
      if (!within(step)) continue;
      upright(step, faded(css(severity), 0.55), [3, 3]);
      marker(ctx, x(step), bbox.top + bbox.height, 5 * ratio, severity);
    }
  }
  for (const line of spec.lines) {
    line.odd.forEach((place, i) => {
      const joined = i > 0 && line.odd[i - 1] === place - 1;
      const [before, step] = [spec.steps[Math.max(0, place - 1)], spec.steps[place]];
      if (!joined && within(step)) wedge(step, css("cell-broken"));
      if (!joined || step < plot.scales.x.min || before > plot.scales.x.max) return;
      // Neighbours without a finite value are one bar, not a row of wedges.
      const from = Math.floor(Math.max(bbox.left, x(before)));
      ctx.fillStyle = css("cell-broken");
      ctx.fillRect(from, bbox.top, Math.ceil(Math.min(bbox.left + bbox.width, x(step))) - from, Math.round(4 * ratio));
    });
  }
  for (const mark of spec.marks) {
    ctx.fillStyle = css("cell-broken");
    for (const step of mark.steps) {
      if (within(step)) ctx.fillRect(x(step) - ratio, bbox.top + bbox.height - 9 * ratio, 2 * ratio, 9 * ratio);
    }
  }
  ctx.restore();
};

// The legend entry of findings, coloured as the worst one that the chart can show.
const findingEntry = (spec) => {
  const entry = el("span", { class: "legend-mark found-at" }, "finding");
  const show = () => {
    const [worst] = [...findingsAt()].filter(([step]) => step >= spec.steps[0] && step <= spec.steps.at(-1));
    entry.hidden = !worst;
    if (worst) entry.style.setProperty("--swatch", `var(--${worst[1].severity})`);
  };
  view.on("findings", show, entry);
  show();
  return entry;
};

const legendOf = (spec, toggle) => {
  const at = el("span", { class: "legend-step" });
  const alone = spec.lines.filter(({ smooths }) => smooths === undefined).length === 1 && Boolean(spec.title);
  const near = (plot) => {
    const { left } = plot.cursor;
    const [hit] = [...findingsAt()].filter(([step]) => Math.abs(plot.valToPos(step, "x") - left) < 6);
    return hit ? ` · ${hit[1].rule.replaceAll("_", " ")}` : "";
  };
  const bottoms = new Map(spec.lines.filter(({ downTo }) => downTo).map(({ downTo }) => [downTo, spec.lines.find(({ label }) => label === downTo)]));
  const entries = spec.lines.map((line, i) => {
    const value = el("span", { class: "legend-value" });
    const swatch = el("span", { class: `swatch ${line.style}${line.over ? " dashed" : ""}` });
    swatch.style.setProperty("--swatch", `var(--tone-${line.tone || TONES[i % TONES.length]})`);
    const side = spec.right ? el("span", { class: "legend-side" }, line.axis === "right" ? " (right)" : " (left)") : null;
    const button = el(
      "button",
      { type: "button", class: "legend-entry", "aria-pressed": "true", title: `Show or hide ${line.label}`, onclick: () => toggle(i, button) },
      swatch,
      el("span", { class: "legend-name" }, line.label),
      side,
      value,
    );
    // The lower border of a band speaks through the band; a lone line through its title.
    if ((bottoms.has(line.label) && line.style === "edge") || line.smooths !== undefined) button.hidden = true;
    if (alone) button.classList.add("alone");
    return { button, value };
  });
  const odd = spec.lines.reduce((sum, line) => sum + line.odd.length, 0);
  const extra = [];
  if (odd) extra.push(el("span", { class: "legend-mark broken" }, "NaN or Inf"));
  for (const span of (spec.spans ?? []).filter(({ label }) => label)) {
    const entry = el("span", { class: "legend-mark span" }, span.label);
    entry.style.setProperty("--swatch", `var(--tone-${span.tone})`);
    extra.push(entry);
  }
  for (const mark of spec.marks) extra.push(el("span", { class: "legend-mark tick" }, `${mark.label} (${number(mark.steps.length)})`));
  if (hasFindings(spec)) extra.push(findingEntry(spec));
  if (spec.overSteps && report.attempts.length && !alone) extra.push(el("span", { class: "legend-mark restart" }, "restart"));
  const host = el("div", { class: "legend" }, entries.map(({ button }) => button), extra, at);
  const show = (plot) => {
    const { idx, idxs } = plot.cursor;
    const here = idx === null || idx === undefined;
    at.textContent = here ? "" : spec.says ? spec.says(idx) : `${spec.across ?? "step"} ${number(spec.steps[idx])}`;
    if (!here && hasFindings(spec)) at.textContent += near(plot);
    entries.forEach(({ value }, i) => {
      const place = here ? null : idxs[i + 1];
      const line = spec.lines[i];
      const label = (of) => (of.odd.includes(place) ? "NaN or Inf" : number((of.says ?? of.values)[place], of.digits ?? 6));
      const none = place === null || place === undefined;
      const bottom = line.style === "edge" ? bottoms.get(line.downTo) : null;
      value.textContent = none ? "" : bottom ? `${label(bottom)} to ${label(line)}` : label(line);
    });
  };
  // As high as it gets when it is full, so that nothing below moves while the pointer does.
  const reserve = () => {
    host.style.minHeight = "";
    const full = "-8.88888e-88";
    entries.forEach(({ value }, i) => (value.textContent = spec.lines[i].style === "edge" ? `${full} to ${full}` : full));
    at.textContent = spec.says ? spec.says(spec.steps.length - 1) : `${spec.across ?? "step"} ${number(spec.steps.at(-1))}`;
    const { height } = host.getBoundingClientRect();
    host.style.minHeight = `${height}px`;
    for (const { value } of entries) value.textContent = "";
    at.textContent = "";
  };
  return { host, show, reserve };
};

const dataOf = (spec) => [
  spec.steps,
  ...spec.lines.map((line) => {
    const { log } = line.axis === "right" ? spec.right : spec.left;
    return drawable(line.smooths === undefined ? line : { ...line, values: smoothed(line.values, log) }, log);
  }),
];

// spec: { title, steps, lines: [{label, axis, style, tone, over, downTo, smooths, values, odd, gap}], left, right, marks,
//         spans, across, adjustable, overSteps, xAxis, xRange, says(idx) }; `odd` and `gap` are places of a line: not
//         finite, not measured; `smooths` is the place of the line that one of an adjustable chart smooths
const drawChart = (host, spec, height = 240) => {
  const box = el("div", { class: "plot" });
  const finite = spec.lines.some((line) => line.values.some((value) => Number.isFinite(value) && (value > 0 || !spec[line.axis].log)));
  const places = Object.fromEntries(spec.lines.map((line, i) => [line.label, i + 1]));
  let plot = null;
  let smooth = false;
  const hidden = new Set();
  const isShown = (line, i) => (line.smooths === undefined ? !hidden.has(i) : smooth && !hidden.has(line.smooths));
  const showSeries = () => spec.lines.forEach((line, i) => plot?.setSeries(i + 1, { show: isShown(line, i) }));
  const legend = legendOf(spec, (i, button) => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    const { style, downTo } = spec.lines[i];
    for (const at of style === "edge" && downTo ? [i, places[downTo] - 1] : [i]) shown ? hidden.delete(at) : hidden.add(at);
    showSeries();
  });
  const toggle = (name, checked, change) => {
    const box = el("input", { type: "checkbox", checked, onchange: () => change(box.checked) });
    return el("label", { class: "check" }, box, name);
  };
  const switches = spec.adjustable && finite ? el("div", { class: "switches" }, toggle("log", spec.left.log, (on) => {
    spec.left.log = on;
    build();
  }), toggle("smooth", false, (on) => {
    smooth = on;
    showSeries();
    plot.redraw(false);
  })) : null;
  const head = el("div", { class: "chart-head" }, spec.title ? el("figcaption", {}, spec.title) : null, legend.host, switches);
  host.append(el("figure", { class: "chart" }, head, box));
  if (!finite) {
    box.append(el("p", { class: "empty" }, spec.left.log ? "No value here is finite and above zero." : "No value here is finite."));
    return null;
  }
  const colour = (line, i) => () => faded(tone(line.tone || TONES[i % TONES.length]), smooth && spec.adjustable && line.smooths === undefined ? 0.35 : 1);
  const options = () => ({
    width: Math.max(120, box.clientWidth),
    height,
    padding: [10, spec.right ? 4 : 24, 0, 0],
    scales: {
      x: { time: false, range: spec.xRange ?? (() => [...view.range]) },
      left: { distr: spec.left.log ? 3 : 1, log: spec.left.base ?? 10, range: axisRange(spec.left) },
      ...(spec.right ? { right: { distr: spec.right.log ? 3 : 1, log: spec.right.base ?? 10, range: axisRange(spec.right) } } : {}),
    },
    axes: [
      spec.xAxis ?? stepAxis(height < 190 ? "" : spec.across ?? "step"),
      verticalAxis(spec.left, "left", 3),
      ...(spec.right ? [verticalAxis(spec.right, "right", 1)] : []),
    ],
    series: [
      {},
      ...spec.lines.map((line, i) => ({
        scale: line.axis,
        label: line.label,
        show: isShown(line, i),
        stroke: line.style === "edge" ? () => "transparent" : colour(line, i),
        width: line.style === "edge" ? 0 : line.smooths === undefined ? 1.5 : 2,
        dash: DASH[line.style] ?? OVER[Math.min(line.over ?? 0, 2)],
        paths: line.style === "steps" ? uPlot.paths.stepped({ align: 1 }) : undefined,
        ...(line.fill ? { fill: () => faded(tone(line.tone), line.fill) } : {}),
        points: line.style === "line" && line.smooths === undefined ? { ...(spec.steps.length <= 40 ? { show: true } : { space: 30 }), size: 4, fill: colour(line, i) } : { show: false },
      })),
    ],
    bands: spec.lines.flatMap((line, i) =>
      line.downTo ? [{ series: [i + 1, places[line.downTo]], fill: () => faded(tone(line.tone || TONES[i % TONES.length]), line.opacity ?? 0.22) }] : [],
    ),
    legend: { show: false },
    cursor: {
      y: false,
      points: { size: 7 },
      drag: { x: true, y: false, setScale: false },
      ...(spec.overSteps ? { sync: { key: "steps", setSeries: false, filters: { pub: (type) => FOLLOWED.has(type) } } } : {}),
      bind: { dblclick: () => () => (spec.overSteps ? view.reset() : null) },
    },
    hooks: {
      draw: [(drawn) => annotate(drawn, spec)],
      setCursor: [(drawn) => legend.show(drawn)],
      setSelect: [
        (drawn) => {
          const { left, width } = drawn.select;
          if (width > 3 && spec.overSteps) view.zoom(Math.floor(drawn.posToVal(left, "x")), Math.ceil(drawn.posToVal(left + width, "x")));
          drawn.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        },
      ],
    },
  });
  const build = () => {
    plot?.destroy();
    plot = new uPlot(options(), dataOf(spec), box);
    box.plot = plot;
  };
  build();
  legend.reserve();
  new ResizeObserver(() => {
    const width = Math.max(120, box.clientWidth);
    if (width === plot.width) return;
    legend.reserve();
    plot.setSize({ width, height });
  }).observe(box);
  if (spec.overSteps) {
    view.on("range", () => plot.setScale("x", { min: view.range[0], max: view.range[1] }), box);
    view.on("focus findings", () => plot.redraw(false), box);
  }
  view.on("theme", () => plot.redraw(false), box);
  return plot;
};

// Whether a chart can take newer numbers as it stands: the same lines, axes and words around them.
const alike = (old, next) => {
  const frame = ({ title, lines, left, right, marks, spans, across, steps, adjustable }) =>
    JSON.stringify([
      title, across, left?.label, adjustable || left?.log, right?.label, right?.log, steps.length <= 40,
      lines.map(({ label, axis, style, tone, over, odd }) => [label, axis, style, tone, over, odd.length > 0]),
      marks.map(({ label, steps: at }) => [label, at.length]), spans ?? [],
    ]);
  return frame(old) === frame(next);
};

// Newer numbers into a drawn chart; what is under the pointer and what the legend hides stay as they are.
const refill = (plot, spec, next) => {
  next.lines.forEach((line, i) => Object.assign(spec.lines[i], line));
  spec.steps = next.steps;
  spec.marks = next.marks;
  plot.setData(dataOf(spec), true);
};

// The mean around each value, in which others weigh less the further away they are; of logarithms on such an axis.
const smoothed = (values, log) => {
  const kept = 1 - 1 / Math.max(2, values.length / 60);
  const drawn = Float64Array.from(values, (value) => (log ? (value > 0 ? Math.log(value) : NaN) : value));
  const [sums, weights] = [new Float64Array(drawn.length), new Float64Array(drawn.length)];
  const pass = (places, own) => {
    let [sum, weight] = [0, 0];
    for (const at of places) {
      sums[at] += kept * sum;
      weights[at] += kept * weight;
      [sum, weight] = [kept * sum, kept * weight];
      if (!Number.isFinite(drawn[at])) continue;
      [sum, weight] = [sum + drawn[at], weight + 1];
      if (own) [sums[at], weights[at]] = [sums[at] + drawn[at], weights[at] + 1];
    }
  };
  pass([...drawn.keys()], true);
  pass([...drawn.keys()].reverse(), false);
  return drawn.map((value, at) => (Number.isFinite(value) ? (log ? Math.exp(sums[at] / weights[at]) : sums[at] / weights[at]) : NaN));
};

// A chart as Python sends it, with its arrays unpacked.
const readChart = async (chart) => {
  const lines = await Promise.all(
    chart.lines.map(async (line, i) => ({
      ...line,
      tone: line.tone || TONES[i % TONES.length],
      values: await unpack(line.values),
      odd: Array.from(await unpack(line.odd)),
      gap: Array.from(await unpack(line.gap)),
    })),
  );
  const smooth = chart.adjustable ? lines.map((line, i) => ({ ...line, label: `${line.label}, smoothed`, odd: [], over: 0, smooths: i })) : [];
  return {
    ...chart,
    overSteps: true,
    steps: await unpack(chart.steps),
    marks: await Promise.all(chart.marks.map(async (mark) => ({ ...mark, steps: await unpack(mark.steps) }))),
    lines: [...lines, ...smooth],
  };
};
