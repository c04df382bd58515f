// Phases of a step, stacked; the largest lies at the bottom. The table below holds the figures.

KINDS.stack = async (host, { steps: packed, exact, phases, slowest: packedSlowest, usual: usualSeconds }) => {
  const steps = await unpack(packed);
  const slowest = await unpack(packedSlowest);
  const seconds = await Promise.all(phases.map((phase) => unpack(phase.seconds)));
  view.reaches(steps[0], steps.at(-1));
  return () => {
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
    const spec = { title: "", steps, lines, left, right: null, marks: [], overSteps: true };
    const plot = drawChart(host, spec, 260);
    if (plot) plot.root.classList.add("stacked");
    if (plot && left.top !== null) {
      const box = el("input", { type: "checkbox", id: "slow-steps", onchange: () => {
        left.top = box.checked ? null : 2 * usual;
        plot.setData(plot.data, true);
      } });
      host.prepend(el("div", { class: "controls" }, el("label", { for: "slow-steps", class: "check" }, box, ` Show the slow steps in full: up to ${number(most, 3)} ms, beyond the top of the chart`)));
    }
    host.append(
      el(
        "div",
        { class: "scroll fit", tabindex: "0", role: "region", "aria-label": "Time by phase" },
        el(
          "table",
          { class: "plain fit" },
          el("thead", {}, el("tr", {}, ["Phase", "Share", "Median", "95th percentile"].map((text, i) => el("th", { scope: "col", class: i ? "figure" : "" }, text)))),
          el(
            "tbody",
            {},
            phases.map(({ label, share, median, p95 }, i) => {
              const swatch = el("span", { class: "swatch area" });
              swatch.style.setProperty("--swatch", `var(--tone-${TONES[i % TONES.length]})`);
              return el("tr", {}, el("th", { scope: "row" }, swatch, label), [share, median, p95].map((value) => el("td", { class: "figure" }, value)));
            }),
          ),
        ),
      ),
    );
  };
};
