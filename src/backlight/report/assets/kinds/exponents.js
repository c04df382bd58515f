// The exponent histogram over steps: of all parameters together, or of the chosen one.

const FORMAT_EDGES = [
  { exponent: -14, label: "smallest normal fp16" },
  { exponent: -24, label: "smallest fp16 above zero" },
];

KINDS.exponents = async (host, { lowest, bins, all, single }) => {
  const read = async ({ first, last, share }) => ({ first: await unpack(first), last: await unpack(last), share: await unpack(share) });
  const [together, each] = [await read(all), await read(single)];
  return () => {
    const choice = el(
      "select",
      { onchange: () => draw() },
      el("option", { value: "all" }, "all parameters"),
      el("option", { value: "one" }, "the chosen parameter"),
    );
    const said = el("span", { class: "hint" });
    const box = el("div", {});
    const legend = el("div", { class: "map-legend" });
    const bar = () => legendBar(legend, { low: 1e-6, high: 1, log: true, clamped: [true, false] }, () => false, "share of values");
    bar();
    view.on("theme", bar, legend);
    host.append(el("div", { class: "controls" }, el("label", {}, "Histogram of ", choice), said), legend, box);
    const used = [...Array(bins).keys()].filter((bin) => together.share.subarray(bin * together.first.length, (bin + 1) * together.first.length).some((value) => value > 0));
    const rows = [];
    for (let bin = Math.min(bins - 1, used.at(-1) + 1); bin >= Math.max(0, used[0] - 1); bin -= 1) rows.push(bin);
    let share = together.share;
    let amount = together.first.length;
    const grid = new Grid(box, {
      name: "Exponent histogram over steps. Arrow keys move.",
      first: together.first,
      last: together.last,
      gutter: 62,
      rows: () => rows,
      height: (shown) => shown * Math.max(5, Math.min(10, 300 / shown)),
      label: (bin) => power("2", lowest + bin),
      group: (bin) => [power("2", Math.floor((lowest + bin) / 4) * 4)],
      merge: Math.max,
      chosen: () => null,
      // From one value in a million to all of them.
      code: (bin, bucket) => {
        const value = share[bin * amount + bucket];
        if (!(value >= 0)) return UNMEASURED;
        return value === 0 ? RAMP : RAMP + Math.round(Math.max(0, 1 + Math.log10(value) / 6) * (STEPS - 1));
      },
      describe: (bin, bucket) => {
        const value = share[bin * amount + bucket];
        return {
          title: `${power("2", lowest + bin)} ≤ |g| < ${power("2", lowest + bin + 1)}`,
          rows: [
            ["recorded", between(grid.first[bucket], grid.last[bucket])],
            ["share of values", Number.isNaN(value) ? "not measured" : `${number(100 * value, 3)} %`],
          ],
        };
      },
      lines: () =>
        FORMAT_EDGES.map(({ exponent, label }) => ({ place: rows.indexOf(exponent - lowest) + 1, label })).filter(({ place }) => place > 0),
    });
    const draw = () => {
      const one = choice.value === "one";
      said.textContent = !one ? "" : view.row === null ? "Choose a parameter in the heat map or the table." : report.parameters[view.row].name;
      box.hidden = one && view.row === null;
      if (box.hidden) return;
      const source = one ? each : together;
      amount = source.first.length;
      share = one ? each.share.subarray(view.row * bins * amount, (view.row + 1) * bins * amount) : together.share;
      grid.cut(source.first, source.last);
      grid.draw();
    };
    view.on("row", () => (choice.value === "one" ? draw() : null), box);
    draw();
  };
};
