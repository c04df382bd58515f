// The exponent histogram over steps: of all parameters together, or of the chosen one.

const FORMAT_EDGES = [
  { exponent: -14, label: "smallest normal fp16" },
  { exponent: -24, label: "smallest fp16 above zero" },
];

KINDS.exponents = async (body, { lowest, bins, all, single }, state) => {
  const [together, each] = await Promise.all([all, single].map(async ({ first, last, share }) => ({ first, last, share: await unpack(share) })));
  Object.assign(state, { together, each });
  if (state.draw) return state.draw();
  const choice = el("select", { onchange: () => state.draw() }, el("option", { value: "all" }, "all parameters"), el("option", { value: "one" }, "the chosen parameter"));
  const hint = el("span", { class: "hint" });
  const box = el("div", {});
  const legend = el("div", { class: "map-legend" });
  const bar = () => legendBar(legend, { low: 1e-6, high: 1, log: true, clamped: [true, false] }, () => false, "share of values");
  bar();
  view.on("theme", bar, legend);
  body.append(el("div", { class: "controls" }, el("label", {}, "Histogram of ", choice), hint), legend, box);
  const rows = () => {
    const { first, share } = state.together;
    const used = [...Array(bins).keys()].filter((bin) => share.subarray(bin * first.length, (bin + 1) * first.length).some((value) => value > 0));
    const top = Math.min(bins - 1, used.at(-1) + 1);
    return Array.from({ length: top - Math.max(0, used[0] - 1) + 1 }, (_, i) => top - i);
  };
  let shown = together;
  const at = (bin, bucket) => shown.share[bin * shown.first.length + bucket];
  const grid = new Grid(box, together.first, together.last, {
    name: "Exponent histogram over steps. Arrow keys move.",
    gutter: 62,
    rows,
    height: (amount) => amount * Math.max(5, Math.min(10, 300 / amount)),
    label: (bin) => power("2", lowest + bin),
    group: (bin) => [power("2", Math.floor((lowest + bin) / 4) * 4)],
    merge: Math.max,
    chosen: () => null,
    // From one value in a million to all of them.
    code: (bin, bucket) => {
      const value = at(bin, bucket);
      if (!(value >= 0)) return UNMEASURED;
      return value === 0 ? RAMP : RAMP + Math.round(Math.max(0, 1 + Math.log10(value) / 6) * (STEPS - 1));
    },
    describe: (bin, bucket) => {
      const value = at(bin, bucket);
      return {
        title: `${power("2", lowest + bin)} ≤ |g| < ${power("2", lowest + bin + 1)}`,
        rows: [
          ["recorded", between(grid.first[bucket], grid.last[bucket])],
          ["share of values", Number.isNaN(value) ? "not measured" : `${number(100 * value, 3)} %`],
        ],
      };
    },
    lines: () => FORMAT_EDGES.map(({ exponent, label }) => ({ place: grid.shown.indexOf(exponent - lowest) + 1, label })).filter(({ place }) => place > 0),
  });
  state.draw = () => {
    const one = choice.value === "one";
    hint.textContent = !one ? "" : view.row === null ? "Choose a parameter in the heat map or the table." : report.parameters[view.row].name;
    box.hidden = one && view.row === null;
    if (box.hidden) return;
    shown = one ? state.each : state.together;
    const part = bins * shown.first.length;
    if (one) shown = { ...shown, share: shown.share.subarray(view.row * part, (view.row + 1) * part) };
    grid.cut(shown.first, shown.last);
    grid.draw();
  };
  view.on("row", () => (choice.value === "one" ? state.draw() : null), box);
  state.draw();
};
