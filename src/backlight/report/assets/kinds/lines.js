// Charts over steps, one below the other, or small ones side by side; a table stands beside them where there is room.

KINDS.lines = async (host, { charts, small, table: figures }) => {
  const read = await Promise.all(charts.map(readChart));
  const several = small && read.length > 1;
  return () => {
    const box = el("div", { class: several ? "small-charts" : "charts" });
    const shelf = el("div", { class: "shelf" });
    host.append(figures ? el("div", { class: "beside" }, box, shelf) : box);
    for (const chart of read) drawChart(box, chart, several ? 180 : 240);
    const fill = ({ tones, note, ...of }) => shelf.replaceChildren(table({ ...of, rows: of.rows.map((cells, i) => swatched(cells, tones[i])) }), el("p", { class: "hint" }, note));
    if (figures) fill(figures);
    const boxes = [...box.querySelectorAll(".plot")];
    return async ({ charts: later, table: newer }) => {
      const next = await Promise.all(later.map(readChart));
      if (next.length !== read.length || !next.every((chart, i) => boxes[i].plot && alike(read[i], chart))) return false;
      next.forEach((chart, i) => refill(boxes[i], read[i], chart));
      if (newer) fill(newer);
      return true;
    };
  };
};

const swatched = ([label, ...cells], colour) => {
  const swatch = el("span", { class: "swatch area" });
  swatch.style.setProperty("--swatch", `var(--tone-${colour})`);
  return [[swatch, label], ...cells];
};
