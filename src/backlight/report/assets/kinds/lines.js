// Charts over steps, one below the other, or small ones side by side.

KINDS.lines = async (host, { charts, small }) => {
  const read = await Promise.all(charts.map(readChart));
  for (const chart of read) if (chart.steps.length) view.reaches(chart.steps[0], chart.steps.at(-1));
  return () => {
    const box = el("div", { class: small && read.length > 1 ? "small-charts" : "" });
    host.append(box);
    for (const chart of read) drawChart(box, chart, small && read.length > 1 ? 180 : 240);
    const boxes = [...box.querySelectorAll(".plot")];
    return async ({ charts: later }) => {
      const next = await Promise.all(later.map(readChart));
      if (next.length !== read.length || !next.every((chart, i) => boxes[i].plot && alike(read[i], chart))) return false;
      for (const chart of next) if (chart.steps.length) view.reaches(chart.steps[0], chart.steps.at(-1));
      next.forEach((chart, i) => refill(boxes[i].plot, read[i], chart));
      return true;
    };
  };
};
