// Charts over steps, one below the other, or small ones side by side; a table stands next to them where there is room.

KINDS.lines = (body, { charts, small, table: figures }, state) => {
  const several = small && charts.length > 1;
  const [shape, shelfShape] = [several ? "small-charts" : "charts", Boolean(figures)];
  if (state.shape !== shape || Boolean(state.shelf) !== shelfShape || state.charts.length > charts.length) {
    for (const { plot } of state.charts ?? []) plot?.destroy();
    state.charts = (state.charts ?? []).slice(0, charts.length).map(({ hidden, log, smooth, whole }) => ({ hidden, log, smooth, whole }));
    Object.assign(state, { shape, box: el("div", { class: shape }), shelf: figures ? el("div", { class: "shelf" }) : null });
    body.replaceChildren(figures ? el("div", { class: "beside" }, state.box, state.shelf) : state.box);
  }
  charts.forEach((chart, i) => drawChart(state.box, readChart(chart), (state.charts[i] ??= {}), several ? 180 : 240));
  if (!figures) return;
  const { tones, note, rows, ...of } = figures;
  const swatched = ([label, ...cells], i) => [[swatchOf(tones[i], "area"), label], ...cells];
  fill(state.shelf, table({ ...of, rows: rows.map(swatched) }), el("p", { class: "hint" }, note));
};
