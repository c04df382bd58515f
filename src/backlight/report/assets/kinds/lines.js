// Charts over steps, one below the other, or small ones side by side.

KINDS.lines = async (host, { charts, small }) => {
  const read = await Promise.all(charts.map(readChart));
  for (const chart of read) if (chart.steps.length) view.reaches(chart.steps[0], chart.steps.at(-1));
  return () => {
    const box = el("div", { class: small && read.length > 1 ? "small-charts" : "" });
    host.append(box);
    for (const chart of read) drawChart(box, chart, small && read.length > 1 ? 180 : 240);
  };
};
