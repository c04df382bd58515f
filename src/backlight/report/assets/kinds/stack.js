// Phases of a step, stacked; the largest lies at the bottom. The table below holds the figures.

// The chart of the stack, and where it ends: slow steps beyond twice the usual are cut off until asked for.
const readStack = async ({ steps: packed, exact, phases, slowest: packedSlowest, usual: usualSeconds }) => {
  const steps = await unpack(packed);
  const slowest = await unpack(packedSlowest);
  const seconds = await Promise.all(phases.map((phase) => unpack(phase.seconds)));
  view.reaches(steps[0], steps.at(-1));
  const sums = [];
  seconds.forEach((values, i) => sums.push(Float64Array.from(values, (value, at) => 1e3 * value + (i ? sums[i - 1][at] : 0))));
  const lines = sums
    .map((values, i) => ({
      label: phases[i].label, axis: "left", style: "area", tone: TONES[i % TONES.length], values, odd: [], opacity: 0.62,
      says: Float64Array.from(seconds[i], (value) => 1e3 * value),
      ...(i ? { downTo: phases[i - 1].label } : { fill: 0.62 }),
    }))
    .reverse();
  if (!exact) lines.push({ label: "slowest step", axis: "left", style: "line", tone: "limit", values: slowest.map((value) => 1e3 * value), odd: [] });
  const [usual, most] = [1e3 * usualSeconds, 1e3 * slowest.reduce((a, b) => Math.max(a, b), 0)];
  const left = { label: "time (ms)", log: false, low: 0, high: null, top: most > 4 * usual ? 2 * usual : null };
  return { spec: { title: "", steps, lines, left, right: null, marks: [], overSteps: true }, usual, most };
};

const phaseRows = (phases) =>
  phases.map(({ label, share, median, p95 }, i) => {
    const swatch = el("span", { class: "swatch area" });
    swatch.style.setProperty("--swatch", `var(--tone-${TONES[i % TONES.length]})`);
    return el("tr", {}, el("th", { scope: "row" }, swatch, label), [share, median, p95].map((value) => el("td", { class: "figure" }, value)));
  });

KINDS.stack = async (host, data) => {
  let { spec, usual, most } = await readStack(data);
  return () => {
    const plot = drawChart(host, spec, 260);
    if (plot) plot.root.classList.add("stacked");
    const full = el("input", { type: "checkbox", id: "slow-steps", onchange: () => {
      spec.left.top = full.checked ? null : 2 * usual;
      plot.setData(plot.data, true);
    } });
    const note = el("span", {});
    const slow = el("div", { class: "controls" }, el("label", { for: "slow-steps", class: "check" }, full, note));
    const tell = () => {
      slow.hidden = !plot || most <= 4 * usual;
      note.textContent = ` Show the slow steps in full: up to ${number(most, 3)} ms, beyond the top of the chart`;
    };
    tell();
    host.prepend(slow);
    const body = el("tbody", {}, phaseRows(data.phases));
    host.append(
      el(
        "div",
        { class: "scroll fit", tabindex: "0", role: "region", "aria-label": "Time by phase" },
        el(
          "table",
          { class: "plain fit" },
          el("thead", {}, el("tr", {}, ["Phase", "Share", "Median", "95th percentile"].map((text, i) => el("th", { scope: "col", class: i ? "figure" : "" }, text)))),
          body,
        ),
      ),
    );
    return async (later) => {
      const next = await readStack(later);
      if (!plot || !alike(spec, next.spec)) return false;
      [usual, most] = [next.usual, next.most];
      spec.left.top = full.checked ? null : next.spec.left.top;
      refill(plot, spec, next.spec);
      tell();
      body.replaceChildren(...phaseRows(later.phases));
      return true;
    };
  };
};
