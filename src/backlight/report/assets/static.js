// A report that was written: everything is there, and drawn once.

const start = async () => {
  const read = await Promise.all(report.panels.map(async (panel) => ({ ...panel, data: await unpackAll(panel.data) })));
  openPage();
  draw(report);
  for (const panel of read) if (panel.kind) await drawPanel(panel);
  slots.footer.textContent = `Written by backlight ${report.version}. ${
    view.grid && !view.grid.precise
      ? `Values under the pointer in the heat map are within ${report.precision} of what was recorded; all others are exact.`
      : "Every value under the pointer is exact."
  }`;
  document.documentElement.dataset.ready = "yes";
  performance.mark("backlight-ready");
};

start();
