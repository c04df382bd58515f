// What lines cannot show: findings, restarts, values that are not finite or beyond the axis, samples and lone points.

// Steps that findings name, each with the worst finding there: findings come worst first.
const findingsAt = () => {
  /** @type {Map<number, Finding>} */
  const worst = new Map();
  for (const finding of report.findings) if (finding.step !== null && !worst.has(finding.step)) worst.set(finding.step, finding);
  return worst;
};

const hasFindings = ({ overSteps, across = "step" }) => overSteps && across === "step";

// A triangle with its tip at a height: it points up where `tall` is positive.
const triangle = (context, x, tip, wide, tall, colour) => {
  context.fillStyle = colour;
  context.beginPath();
  context.moveTo(x, tip);
  context.lineTo(x - wide, tip + tall);
  context.lineTo(x + wide, tip + tall);
  context.fill();
};

// A finding at a step: a triangle that stands on the axis.
const marker = (context, x, bottom, size, severity) => triangle(context, x, bottom - 1.6 * size, size, 1.6 * size, css(severity));

// What lines cannot show: a restart, the step in focus, findings, values that are not finite, marked steps.
/** @type {(plot: any, spec: Spec) => void} */
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
  drawBeyond(plot, spec);
  spec.lines.forEach((line, i) => {
    if (!plot.series[i + 1].show) return;
    const filled = line.downTo || line.fill;
    const values = plot.data[i + 1];
    if (filled) drawBars(plot, spec, line, values, line.downTo && plot.data[1 + spec.lines.findIndex(({ label }) => label === line.downTo)]);
    else if (line.sampled?.length && line.style !== "edge" && line.style !== "area") drawSamples(plot, spec, line, values);
    line.odd.forEach((place, i) => {
      const joined = i > 0 && line.odd[i - 1] === place - 1;
      const [before, step] = [spec.steps[Math.max(0, place - 1)], spec.steps[place]];
      if (!joined && within(step)) triangle(ctx, x(step), bbox.top + 9 * ratio, 5 * ratio, -9 * ratio, css("cell-broken"));
      if (!joined || step < plot.scales.x.min || before > plot.scales.x.max) return;
      // Neighbours without a finite value are one bar, not a row of wedges.
      const from = Math.floor(Math.max(bbox.left, x(before)));
      ctx.fillStyle = css("cell-broken");
      ctx.fillRect(from, bbox.top, Math.ceil(Math.min(bbox.left + bbox.width, x(step))) - from, Math.round(4 * ratio));
    });
  });
  for (const mark of spec.marks) {
    ctx.fillStyle = css("cell-broken");
    for (const step of mark.steps) {
      if (within(step)) ctx.fillRect(x(step) - ratio, bbox.top + bbox.height - 9 * ratio, 2 * ratio, 9 * ratio);
    }
  }
  ctx.restore();
};

// A sample as dots from one recorded step to the next; where they are dense they look like a line.
/** @type {(plot: any, spec: Spec, line: Line, values: (number | null)[]) => void} */
const drawSamples = (plot, spec, line, values) => {
  const { ctx, bbox } = plot;
  const { min, max } = plot.scales.x;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.beginPath();
  for (const [from, to] of pairsOf(line.sampled)) {
    if (to < min || from > max) continue;
    const first = firstAt(line.known.length, (i) => spec.steps[line.known[i]], Math.max(from, min)) - 1;
    let height = null;
    for (const place of line.known.slice(Math.max(0, first))) {
      const [step, value] = [spec.steps[place], values[place]];
      if (step < from) continue;
      if (step > to) break;
      if (value === null) {
        height = null;
        continue;
      }
      const [x, y] = [plot.valToPos(step, "x", true), plot.valToPos(value, line.axis, true)];
      if (height === null) ctx.moveTo(x, y);
      else {
        if (line.style === "steps") ctx.lineTo(x, height);
        ctx.lineTo(x, y);
      }
      height = y;
      if (step > max) break;
    }
  }
  ctx.strokeStyle = line.colour();
  ctx.lineWidth = 1.25 * ratio;
  ctx.setLineDash([1.25 * ratio, 2.5 * ratio]);
  ctx.stroke();
  ctx.restore();
};

// Bands and areas at a step apart from others: a bar, since nothing is known of what is between.
/** @type {(plot: any, spec: Spec, line: Line, values: (number | null)[], below: (number | null)[]) => void} */
const drawBars = (plot, spec, line, values, below) => {
  const ratio = devicePixelRatio;
  const floor = plot.bbox.top + plot.bbox.height;
  plot.ctx.fillStyle = faded(tone(line.tone), line.opacity ?? 0.5);
  for (const place of line.apart) {
    const step = spec.steps[place];
    if (step < plot.scales.x.min || step > plot.scales.x.max) continue;
    // A band may reach down to a zero, which a logarithmic axis does not have.
    const [top, bottom] = [values[place], below?.[place] ?? 0].map((value) => Math.min(floor, Math.max(plot.bbox.top, plot.valToPos(value, line.axis, true) || floor)));
    plot.ctx.fillRect(Math.round(plot.valToPos(step, "x", true) - 1.5 * ratio), top, 3 * ratio, bottom - top);
  }
};

// Values beyond the end of the axis: a wedge at each step that points to them, and the largest in words.
/** @type {(plot: any, spec: Spec) => void} */
const drawBeyond = (plot, spec) => {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  const { min, max } = plot.scales.x;
  const shown = beyond(spec).filter(([step]) => step >= min && step <= max);
  if (!shown.length || spec.left.whole) return;
  for (const [step] of shown) triangle(ctx, plot.valToPos(step, "x", true), bbox.top - 7 * ratio, 5 * ratio, 8.5 * ratio, css("ink-soft"));
  const [step, value] = shown.reduce((most, each) => (each[1] > most[1] ? each : most));
  const text = `${number(value, 3)} at step ${number(step)}`;
  ctx.font = `${12 * ratio}px ${css("font")}`;
  const wide = ctx.measureText(text).width;
  let x = plot.valToPos(step, "x", true) + 10 * ratio;
  for (const [later] of shown) {
    const wedge = plot.valToPos(later, "x", true); // in order of steps
    if (wedge > x - 10 * ratio && wedge < x + wide) x = wedge + 10 * ratio;
  }
  const right = x + wide > bbox.left + bbox.width;
  ctx.textAlign = right ? "right" : "left";
  ctx.fillText(text, right ? x - 20 * ratio : x, bbox.top - 2 * ratio);
};

// Steps whose values are beyond the end of the axis, each with its largest.
/** @type {(spec: Spec) => [number, number][]} */
const beyond = ({ left, lines, steps }) => {
  const largest = new Map();
  for (const line of left.top ? lines : []) {
    if (line.axis !== "left") continue;
    line.values.forEach((value, place) => {
      if (value > left.top) largest.set(steps[place], Math.max(value, largest.get(steps[place]) ?? 0));
    });
  }
  return [...largest];
};
