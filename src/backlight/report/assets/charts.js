// Line charts over steps, on uPlot: one look, one range of steps, a legend that names what is under the cursor.

const DASH = { dashed: [7, 5] };
// A line that runs over others: what is beneath it shows in its gaps.
const OVER = [undefined, [7, 5], [2, 4]];
const POINT_ROOM = 12; // px from one point to the next where all are drawn
const SAMPLE_ROOM = 5; // px where those of a sample are

// The legend entry of findings, coloured as the worst one.
const findingEntry = () => {
  const entry = el("span", { class: "legend-mark found-at" }, "finding");
  const show = () => {
    const [worst] = findingsAt().values();
    entry.hidden = !worst;
    if (worst) entry.style.setProperty("--swatch", `var(--${worst.severity})`);
  };
  view.on("findings", show, entry);
  show();
  return entry;
};

// What a line is made of, where it is not every value: a sample, or the extremes of ranges.
/** @param {Spec} spec */
const madeOf = ({ lines, range, across = "step" }) => {
  const spacings = lines.flatMap(({ sampled, every, smooths }) => (sampled?.length && smooths === undefined ? [every] : []));
  const [least, most] = [Math.min(...spacings), Math.max(...spacings)];
  return [
    spacings.length ? el("span", { class: "legend-mark sample" }, `recorded every ${least === most ? number(most) : `${number(least)} to ${number(most)}`} ${across}s`) : null,
    range > 1 ? el("span", { class: "legend-mark" }, `smallest and largest of every ${number(range)} ${across}s`) : null,
  ].filter(Boolean);
};

/** @param {Spec} spec @param {Set<string>} hidden */
const legendOf = (spec, hidden, toggle) => {
  const at = el("span", { class: "legend-step" });
  const alone = spec.lines.filter(({ smooths }) => smooths === undefined).length === 1 && Boolean(spec.title);
  const near = (plot) => {
    const { left } = plot.cursor;
    const [hit] = [...findingsAt()].filter(([step]) => Math.abs(plot.valToPos(step, "x") - left) < 6);
    return hit ? ` · ${shortened(hit[1].title.replaceAll("`", ""), ({ length }) => length <= 48)}` : "";
  };
  const bottoms = new Map(spec.lines.filter(({ downTo }) => downTo).map(({ downTo }) => [downTo, spec.lines.find(({ label }) => label === downTo)]));
  const entries = spec.lines.map((line, i) => {
    const value = el("span", { class: "legend-value" });
    const swatch = swatchOf(line.tone || TONES[i % TONES.length], `${line.style}${line.over ? " dashed" : ""}`);
    const side = spec.right ? el("span", { class: "legend-side" }, line.axis === "right" ? " (right)" : " (left)") : null;
    const button = el(
      "button",
      { type: "button", class: "legend-entry", "aria-pressed": String(!hidden.has(line.label)), title: `Show or hide ${line.label}`, onclick: () => toggle(line, button) },
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
  const extra = madeOf(spec);
  if (spec.lines.some(({ odd }) => odd.length)) extra.push(el("span", { class: "legend-mark broken" }, "NaN or Inf"));
  for (const span of (spec.spans ?? []).filter(({ label }) => label)) {
    extra.push(el("span", { class: "legend-mark span", style: { "--swatch": `var(--tone-${span.tone})` } }, span.label));
  }
  for (const mark of spec.marks) extra.push(el("span", { class: "legend-mark tick" }, `${mark.label} (${number(mark.steps.length)})`));
  if (hasFindings(spec)) extra.push(findingEntry());
  if (spec.overSteps && report.attempts.length && !alone) extra.push(el("span", { class: "legend-mark restart" }, "restart"));
  const host = el("div", { class: "legend" }, entries.map(({ button }) => button), extra, at);
  const stepText = (step) => `${spec.across ?? "step"} ${number(step)}`;
  // The values at the cursor, at rest those of the last step; one that was recorded at another step says at which.
  const show = (plot) => {
    const { left, idx, idxs } = plot.cursor;
    const here = left >= 0 && idx !== null && idx !== undefined;
    const places = here ? idxs.slice(1) : spec.lines.map((line) => (spec.overSteps ? nearestPlace(spec, line, view.range[1]) : null));
    const step = !here ? Math.max(...places.map((place) => spec.steps[place] ?? -Infinity)) : spec.overSteps ? view.cursor ?? spec.steps[idx] : spec.steps[idx];
    at.textContent = !here && !spec.overSteps ? "" : spec.says ? spec.says(here ? idx : spec.steps.length - 1) : stepText(step);
    if (here && hasFindings(spec)) at.textContent += near(plot);
    entries.forEach(({ value }, i) => {
      const place = places[i];
      const line = spec.lines[i];
      const label = (of) => (of.odd.includes(place) ? "NaN or Inf" : number((of.says ?? of.values)[place], of.digits ?? (spec.overSteps && here ? 6 : 4)));
      const bottom = line.style === "edge" ? bottoms.get(line.downTo) : null;
      const none = place === null || place === undefined;
      const elsewhere = none || spec.says || spec.steps[place] === step ? "" : ` at ${number(spec.steps[place])}`;
      value.textContent = none ? "" : `${bottom ? `${label(bottom)} to ${label(line)}` : label(line)}${elsewhere}`;
    });
  };
  // As high as it is with all values, so that nothing below moves while the pointer does.
  const reserve = (plot) => {
    host.style.minHeight = "";
    if (!spec.overSteps) entries.forEach(({ value }, i) => (value.textContent = spec.lines[i].style === "edge" ? "0.8888 to 0.8888" : "0.8888"));
    else show(plot);
    if (spec.overSteps || innerWidth > 640) host.style.minHeight = `${host.getBoundingClientRect().height}px`;
    show(plot);
  };
  return { host, show, reserve };
};

// The points to draw of a line: all where they have room, else those of a sample, and those without neighbours.
/** @type {(plot: any, spec: Spec, line: Line) => number[] | null} */
const pointsOf = (plot, spec, line) => {
  if (line.style === "edge" || line.style === "area" || line.smooths !== undefined) return null;
  const { min, max } = plot.scales.x;
  const places = line.places.filter((place) => spec.steps[place] >= min && spec.steps[place] <= max);
  const width = plot.bbox.width / devicePixelRatio;
  if (line.style === "line" && places.length * POINT_ROOM <= width) return places;
  const drawn = places.length * SAMPLE_ROOM <= width ? line.apart : line.alone;
  return drawn.length ? drawn : null;
};

// Where a line is not drawn, in pixels from left to right: where uPlot sees a null, and in breaks and samples.
/** @type {(plot: any, line: Line, nulls: number[][]) => number[][]} */
const cutsOf = (plot, line, nulls) => {
  const { min, max } = plot.scales.x;
  const rise = line.style === "steps" ? 2 * devicePixelRatio : 0; // the way up or down to the value after a cut
  const pixels = line.cuts.filter(([from, to]) => to > min && from < max).map(([from, to]) => [plot.valToPos(from, "x", true), plot.valToPos(to, "x", true) + rise]);
  const merged = [];
  for (const [from, to] of [...nulls, ...pixels].sort((a, b) => a[0] - b[0])) {
    const before = merged.at(-1);
    if (before && from <= before[1]) before[1] = Math.max(before[1], to);
    else merged.push([from, to]);
  }
  return merged;
};

/**
 * Draw a chart in `host`, or newer numbers into the one that is there, where they differ in nothing else. `state` holds what
 * is drawn and what the reader did to it: lines that are hidden, a logarithmic axis, smoothing, values beyond the axis.
 * @param {Element} host @param {Spec} spec @param {ChartState} state
 */
const drawChart = (host, spec, state, height = 240) => {
  if (state.plot && isAlike(state.spec, spec)) return refill(state, spec);
  const hidden = (state.hidden ??= new Set());
  state.spec = spec;
  state.plot?.destroy();
  state.plot = null;
  if (spec.adjustable) spec.left.log = state.log ??= spec.left.log;
  spec.left.whole = state.whole ?? false;
  const box = el("div", { class: "plot", style: { "min-height": `${height}px` } });
  const finite = !spec.empty && spec.lines.some((line) => line.values.some((value) => Number.isFinite(value) && (value > 0 || !spec[line.axis].log)));
  const places = Object.fromEntries(spec.lines.map((line, i) => [line.label, i + 1]));
  const isShown = (line) => (line.smooths === undefined ? !hidden.has(line.label) : Boolean(state.smooth) && !hidden.has(spec.lines[line.smooths].label));
  const showSeries = () => spec.lines.forEach((line, i) => state.plot.setSeries(i + 1, { show: isShown(line) }));
  const legend = legendOf(spec, hidden, (line, button) => {
    const shown = hidden.has(line.label);
    button.setAttribute("aria-pressed", String(shown));
    for (const label of line.style === "edge" && line.downTo ? [line.label, line.downTo] : [line.label]) shown ? hidden.delete(label) : hidden.add(label);
    showSeries();
  });
  state.legend = legend;
  const switches = [
    spec.left.top ? check(`in full, up to ${number(Math.max(...beyond(spec).map(([, value]) => value)), 3)}`, spec.left.whole, (on) => {
      spec.left.whole = state.whole = on;
      state.plot.setData(state.plot.data, true);
    }) : null,
    spec.adjustable ? check("log", spec.left.log, (on) => {
      spec.left.log = state.log = on;
      build();
    }) : null,
    spec.adjustable ? check("smooth", state.smooth, (on) => {
      state.smooth = on;
      showSeries();
      state.plot.redraw(false);
    }) : null,
  ].filter(Boolean);
  const head = el("div", { class: "chart-head" }, spec.title ? el("figcaption", {}, spec.title) : null, legend.host, finite && switches.length ? el("div", { class: "switches" }, switches) : null);
  const figure = el("figure", { class: "chart" }, head, box);
  if (state.figure?.parentNode === host) state.figure.replaceWith(figure);
  else host.append(figure);
  state.figure = figure;
  if (!finite) {
    box.style.minHeight = "";
    box.append(el("p", { class: "empty" }, spec.empty || (spec.left.log ? "No value here is finite and above zero." : "No value here is finite.")));
    return;
  }
  spec.lines.forEach((line, i) => {
    line.colour = () => faded(tone(line.tone || TONES[i % TONES.length]), state.smooth && spec.adjustable && line.smooths === undefined ? 0.35 : 1);
  });
  const size = () => ({ width: Math.max(120, box.clientWidth), height: Math.max(height, box.clientHeight) });
  const ownRange = () => (spec.steps.length > 1 ? [spec.steps[0], spec.steps.at(-1)] : [spec.steps[0] - 0.5, spec.steps[0] + 0.5]);
  const options = () => ({
    ...size(),
    padding: [12, spec.right ? 4 : 24, 0, 0],
    scales: {
      x: { time: false, range: () => spec.xRange?.() ?? (spec.overSteps ? [...view.range] : ownRange()) },
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
        show: isShown(line),
        stroke: line.style === "edge" ? () => "transparent" : line.colour,
        width: line.style === "edge" ? 0 : line.smooths === undefined ? 1.5 : 2,
        dash: DASH[line.style] ?? OVER[Math.min(line.over ?? 0, 2)],
        paths: line.style === "steps" ? uPlot.paths.stepped({ align: 1 }) : undefined,
        gaps: (drawn, series, first, last, nulls) => cutsOf(drawn, line, nulls),
        ...(line.fill ? { fill: () => faded(tone(line.tone), line.fill) } : {}),
        points: { show: () => false, filter: (drawn) => pointsOf(drawn, spec, line), size: 4, fill: line.colour },
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
      dataIdx: (drawn, series, index, step) => (series === 0 ? index : nearestPlace(spec, spec.lines[series - 1], spec.overSteps ? Math.round(step) : step)),
      bind: { dblclick: () => () => (spec.overSteps ? view.reset() : null) },
    },
    hooks: {
      draw: [(drawn) => annotate(drawn, spec)],
      setCursor: [
        (drawn) => {
          const { left } = drawn.cursor;
          if (spec.overSteps) view.point(left < 0 ? null : Math.round(drawn.posToVal(left, "x")), drawn);
          legend.show(drawn);
        },
      ],
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
    state.plot?.destroy();
    state.plot = new uPlot(options(), dataOf(spec), box);
    Object.assign(box, { plot: state.plot });
  };
  build();
  legend.reserve(state.plot);
  new ResizeObserver(() => {
    const next = size();
    const { plot } = state;
    if (!box.isConnected) return;
    if (next.width !== plot.width) legend.reserve(plot);
    if (next.width !== plot.width || next.height !== plot.height) plot.setSize(next);
  }).observe(box);
  view.on("theme", () => state.plot.redraw(false), box);
  if (!spec.overSteps) return;
  view.on("range", () => {
    state.plot.setScale("x", { min: view.range[0], max: view.range[1] });
    legend.show(state.plot);
  }, box);
  view.on("focus findings", () => state.plot.redraw(false), box);
  view.on("cursor", () => {
    const { plot } = state;
    if (view.pointer === plot) return;
    const within = view.cursor !== null && view.cursor >= view.range[0] && view.cursor <= view.range[1];
    plot.setCursor({ left: within ? plot.valToPos(view.cursor, "x") : -10, top: within ? 0 : -10 }, false);
    legend.show(plot);
  }, box);
};

// Whether a chart can take newer numbers as it stands: the same lines, axes and words around them.
/** @type {(old: Spec, next: Spec) => boolean} */
const isAlike = (old, next) => {
  /** @param {Spec} spec */
  const frame = ({ title, lines, left, right, marks, spans = [], across, range, adjustable, empty }) =>
    JSON.stringify([
      title, across, left?.label, adjustable || left?.log, right?.label, right?.log, range, left?.top === null, empty,
      lines.map(({ label, axis, style, tone, over, odd, every }) => [label, axis, style, tone, over, odd.length > 0, every]),
      marks.map(({ label, steps: at }) => [label, at.length]), spans.filter(({ label }) => label),
    ]);
  return frame(old) === frame(next);
};

/** @param {ChartState} state @param {Spec} next */
const refill = ({ spec, plot, legend }, { lines, left: { log: _, ...left }, ...next }) => {
  lines.forEach((line, i) => Object.assign(spec.lines[i], line));
  Object.assign(spec, next);
  Object.assign(spec.left, left);
  plot.setData(dataOf(spec), true);
  legend.show(plot);
};
