// Stacks as bars, each on top of its caller and as wide as its time; a click spreads one over the whole width.

const FLAME_ROW = 20;

KINDS.flame = async (host, { bars, tables }) => {
  const figures = await KINDS.figures(host, { tables });
  return () => {
    const levels = 1 + Math.max(...bars.map(({ level }) => level));
    const graph = el("div", { class: "flame", role: "group", "aria-label": "Flame graph" });
    graph.style.height = `${levels * FLAME_ROW}px`;
    let spread = null;
    const place = () => {
      const [begin, width] = spread ? [spread.begin, spread.width] : [0, 1];
      bars.forEach((bar, i) => {
        const node = graph.children[i];
        const left = Math.max(0, (bar.begin - begin) / width);
        const right = Math.min(1, (bar.begin + bar.width - begin) / width);
        node.hidden = right - left < 1e-3;
        node.style.left = `${100 * left}%`;
        node.style.width = `${100 * (right - left)}%`;
      });
    };
    for (const bar of bars) {
      const node = el("button", { type: "button", title: bar.label, onclick: () => {
        spread = spread === bar ? null : bar;
        place();
      } }, bar.label);
      node.style.bottom = `${bar.level * FLAME_ROW}px`;
      node.style.setProperty("--swatch", `var(--tone-${TONES[bar.phase % TONES.length]})`);
      graph.append(node);
    }
    place();
    host.append(graph);
    figures();
  };
};
