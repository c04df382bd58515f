// What a chart holds: its lines unpacked, stacked and smoothed, and where each may be drawn through.
//
// A line: {label, axis, style, tone, over, downTo, smooths, values, says, odd, gap, breaks, sampled, every}. `odd` and
// `gap` are places: not finite, not measured. `breaks` and `sampled` are ranges of steps [from, to, from, to, …]: in a
// break nothing was recorded, in a sample every n-th step was. `smooths` is the place of the line that one smooths.

// Values as uPlot wants them: undefined where a line has no point here, null where a point cannot be drawn.
/** @type {(line: Line, log: boolean) => (number | null | undefined)[]} */
const drawable = (line, log) => {
  const breaks = new Set([...line.odd, ...(line.gap ?? [])]);
  return Array.from(line.values, (value, i) => {
    if (breaks.has(i)) return null;
    if (Number.isNaN(value)) return undefined;
    return log && value <= 0 ? null : value;
  });
};

// The values of a chart, and of each of its lines the places that were recorded, those without neighbours (`alone`), and
// those that no line or area reaches, samples among them (`apart`).
/** @param {Spec} spec */
const dataOf = (spec) => {
  const columns = spec.lines.map((line) => {
    const { log } = spec[line.axis];
    const values = drawable(line.smooths === undefined ? line : { ...line, values: smoothed(line.values, log) }, log);
    const odd = new Set(line.odd);
    line.places = values.flatMap((value, i) => (typeof value === "number" || odd.has(i) ? [i] : []));
    line.known = values.flatMap((value, i) => (value === undefined ? [] : [i]));
    line.alone = aloneIn(spec.steps, line, values);
    const lonely = new Set(line.alone);
    line.apart = line.known.filter((place) => values[place] !== null && (lonely.has(place) || inRange(line.sampled ?? [], spec.steps[place])));
    line.cuts = [line.breaks ?? [], line.sampled ?? []].flatMap((ranges) => pairsOf(ranges)).sort((a, b) => a[0] - b[0]);
    return values;
  });
  return [spec.steps, ...columns];
};

const pairsOf = (ranges) => Array.from({ length: ranges.length / 2 }, (_, i) => [ranges[2 * i], ranges[2 * i + 1]]);

// The first index at which `at` reaches a value; it grows with the index.
const firstAt = (length, at, value) => {
  let [low, high] = [0, length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at(middle) < value) low = middle + 1;
    else high = middle;
  }
  return low;
};

// Whether a step is in one of the ranges, at its ends or between.
const inRange = (ranges, step) => {
  const at = firstAt(ranges.length / 2, (i) => ranges[2 * i + 1], step);
  return 2 * at < ranges.length && ranges[2 * at] <= step;
};

// Places between breaks on both sides.
/** @type {(steps: Steps, line: Line, values: (number | null)[]) => number[]} */
const aloneIn = (steps, { known, breaks = [] }, values) => {
  const shut = (from, to) => {
    if (from < 0 || to >= values.length) return true;
    const middle = (steps[from] + steps[to]) / 2;
    return values[from] === null || values[to] === null || inRange(breaks, middle);
  };
  return known.filter((place, i) => values[place] !== null && shut(known[i - 1] ?? -1, place) && shut(place, known[i + 1] ?? values.length));
};

// The recorded place of a line that is nearest to a step, null where it has none.
/** @type {(spec: Spec, line: Line, step: number) => number | null} */
const nearestPlace = ({ steps }, { places }, step) => {
  let at = firstAt(places.length, (i) => steps[places[i]], step);
  if (at === places.length || (at > 0 && step - steps[places[at - 1]] <= steps[places[at]] - step)) at -= 1;
  return places[at] ?? null;
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

// Lines that are stacked, the top one first: each is filled down to the one below, and tells its own value.
/** @type {(lines: Line[]) => Line[]} */
const stacked = (lines) => {
  const areas = lines.filter(({ style }) => style === "area");
  let below = null;
  const piled = areas.map((line, i) => {
    const values = below ? line.values.map((value, at) => value + below[at]) : line.values;
    below = values;
    return { ...line, says: line.values, values, opacity: 0.62, ...(i ? { downTo: areas[i - 1].label } : { fill: 0.62 }) };
  });
  return [...piled.reverse(), ...lines.filter(({ style }) => style !== "area")];
};

/**
 * A chart as Python sends it: areas stacked, a smoothed line for each where the reader may ask for them.
 * @param {ChartData} chart
 * @returns {Spec}
 */
const readChart = (chart) => {
  const lines = stacked(
    chart.lines.map((line, i) => {
      const [odd, gap, breaks, sampled] = [line.odd, line.gap, line.breaks, line.sampled].map((places) => Array.from(places));
      return { ...line, tone: line.tone || TONES[i % TONES.length], odd, gap, breaks, sampled };
    }),
  );
  const smooth = chart.adjustable ? lines.map((line, i) => ({ ...line, label: `${line.label}, smoothed`, odd: [], over: 0, smooths: i })) : [];
  return { ...chart, left: { ...chart.left }, says: chart.names.length ? (place) => chart.names[place] : null, overSteps: chart.across === (report.across ?? "step"), lines: [...lines, ...smooth] };
};
