// Axes of charts: their ranges, ticks and words.

const axisFont = () => `12px ${css("font")}`;

// The ticks of a logarithmic axis that are worth a line and a label: whole powers, thinned out where they are
// many; the numbers between them where there are too few.
const logSplits = (base) => (plot, axis, low, high) => {
  const room = Math.max(2, Math.floor(plot.bbox.height / devicePixelRatio / 30));
  const [from, to] = [Math.log(low) / Math.log(base), Math.log(high) / Math.log(base)];
  const every = Math.max(1, Math.ceil((to - from) / room));
  const powers = [];
  for (let exponent = Math.ceil(from - 1e-9); exponent <= to + 1e-9; exponent += 1) if (exponent % every === 0) powers.push(base ** exponent);
  if (powers.length > 1) return powers;
  for (const factors of [[1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 8]]) {
    const between = [];
    for (let exponent = Math.floor(from); exponent <= to; exponent += 1) for (const times of factors) between.push(times * base ** exponent);
    const inside = between.filter((value) => value >= low && value <= high);
    if (inside.length > 1) return inside;
  }
  return [low, (low + high) / 2, high];
};

// Read anew at each drawing: newer numbers, or the reader, may move the ends.
/** @param {Spec["left"]} axis */
const axisRange = (axis) => (plot, min, max) => {
  const { log, low, high, fixed } = axis;
  if (fixed) return fixed;
  if (log) {
    if (!(min > 0)) return [0.1, 10];
    const room = Math.max(1.15, (max / min) ** 0.05);
    return [min / room, max * room];
  }
  if (axis.top && !axis.whole) return [low ?? 0, axis.top];
  if (min === null) return [low ?? 0, high ?? 1];
  const room = (max - min || Math.abs(max) || 1) * 0.06;
  const from = low === null ? min - room : Math.min(low, min);
  const to = high === null ? max + room : Math.max(high, max);
  return [low === null ? from : from - (high === null ? 0 : (to - from) * 0.02), high === null ? to : to + (to - from) * 0.02];
};

/** @param {AxisData} axis @param {string} scale @param {number} side */
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

// The smallest 1, 2 or 5 times a power of ten that leaves room for labels.
const spacingOf = (room) => {
  const ten = 10 ** Math.floor(Math.log10(room));
  return Math.max(1, [1, 2, 5, 10].map((times) => times * ten).find((each) => each >= 0.999 * room));
};

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
  // The last step of the range has a label of its own.
  splits: (plot, axis, low, high) => {
    const label = 24 + 7 * number(Math.round(high)).length;
    const room = ((high - low) * label * devicePixelRatio) / plot.bbox.width;
    const size = spacingOf(room);
    const steps = [];
    for (let step = Math.ceil(low / size) * size; step <= high - 0.8 * room; step += size) steps.push(step);
    return [...steps, Math.floor(high)];
  },
  filter: (plot, splits) => splits,
  values: (plot, splits) => splits.map((value) => number(Math.round(value))),
});
