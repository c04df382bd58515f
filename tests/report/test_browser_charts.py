"""Charts in headless Chromium: one range of steps, nothing drawn over a gap, one cursor, no empty space."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import NEEDS_CHROMIUM, Open, wait
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from synthetic import FULL, Plan, gradient_row, health_of, records, update_row, write_report, write_run

from backlight.analysis.compare import compare
from backlight.analysis.comparison_answer import write_comparison
from backlight.analysis.report import source_of
from backlight.report.page import render_page, write_page
from backlight.report.source import Source
from backlight.store.read.run import Run
from run_builder import build_run

pytestmark = NEEDS_CHROMIUM

LAST = 499
RECORDED = (*range(100), 200, *range(300, 401, 10))
"""Steps with measurements: each one, a single one, and a sample; those behind them are missing."""

ACROSS = (
    "[...document.querySelectorAll('.plot')].map((b) => b.plot).filter((p) => p?.axes[0].label === 'step')"
)
"""Charts over steps in a script."""


COPIED = """
const copied = ({ ctx: { canvas } }) => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {willReadFrequently: true});
  copy.drawImage(canvas, 0, 0);
  return copy;
};
"""


def script(name: str) -> str:
    """Return a script of the page, whose names no other script can use."""
    return (Path(__file__).parents[2] / f"src/backlight/report/assets/{name}.js").read_text()


@contextmanager
def sized(driver: webdriver.Chrome, width: int) -> Iterator[None]:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    yield
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("gaps") / "run"
    table = records(FULL)[:6]
    series: dict[str, Any] = {"gradient": {}, "update": {}}
    scalars: dict[int, dict[str, float]] = {}
    draw = np.random.default_rng(3)
    numel = np.array([record.numel for record in table])
    for step in RECORDED:
        rms = 1e-3 * np.exp(draw.normal(0, 0.3, len(table)))
        floats, integers = gradient_row(rms, numel, draw)
        series["gradient"][step] = floats, integers
        series["update"][step] = update_row(rms, numel, integers[:, 0], draw, 0.5)
        seconds = {"phase/forward": 0.01 + 0.001 * draw.random(), "phase/backward": 0.02, "phase/data": 0.001}
        cold = {"phase/compile": 9.0} if step == 0 else {}
        losses = {"loss": 2 - step / 500, "total_norm": 1 + draw.random(), "lr/0/0": 1e-3 * step}
        scalars[step] = losses | seconds | cold
    scalars[LAST] = scalars.get(LAST, {}) | {"backwards": 1.0}
    return build_run(
        path, monitors=("health", "steptime"), table=table, series=series, scalars=scalars,
        events=[(LAST, "warning", {"message": "the end"})],
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    health = np.array(RECORDED), 0.5 + 0.4 * np.sin(np.arange(len(RECORDED)))
    return write_report(run, [], tmp_path_factory.mktemp("page") / "page.html", health=health)


@pytest.mark.slow
def test_steps_between_recorded_ones_are_in_the_legend_of_the_heat_map(
    show: Open, page: Path, tmp_path: Path
) -> None:
    assert "not measured" in show(page).find_element(By.CSS_SELECTOR, ".map-legend").text
    whole = write_run(tmp_path / "whole", Plan(steps=20, blocks=1))
    driver = show(write_report(whole, [], tmp_path / "whole.html"))
    assert "not measured" not in driver.find_element(By.CSS_SELECTOR, ".map-legend").text


@pytest.mark.slow
def test_labels_of_many_rows_do_not_overlap(show: Open, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=4, blocks=150))
    driver = show(write_report(run, [], tmp_path / "page.html"))
    drawn = driver.execute_script("""
      const found = [];
      const plain = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        if (this.canvas.closest("#heat-map") && this.textAlign === "right") found.push(y);
        plain.call(this, text, x, y);
      };
      document.querySelector("button.theme").click();
      CanvasRenderingContext2D.prototype.fillText = plain;
      return found;
    """)
    assert len(drawn) > 20
    assert min(np.diff(drawn)) >= 12


@pytest.mark.slow
def test_ticks_of_a_logarithmic_axis_are_round(show: Open, page: Path) -> None:
    ticks = f"{script('axes')}; return logSplits(10)({{bbox: {{height: 200}}}}, null, ...arguments)"
    driver = show(page)
    for ends, expected in (
        ((0.38, 0.69), [0.4, 0.5, 0.6]),
        ((0.78, 1.7), [0.8, 1, 1.5]),
        ((0.3, 3), [0.5, 1, 2]),
        ((0.01, 10), [0.01, 0.1, 1, 10]),
    ):
        assert driver.execute_script(ticks, *ends) == pytest.approx(expected)


@pytest.mark.slow
def test_labels_of_the_depth_chart_keep_what_sets_them_apart(show: Open, page: Path) -> None:
    names = ["Sequential.0.weight", "Sequential#2.0.weight", "fc.weight"]
    depth = f"const KINDS = {{}}; {script('kinds/depth')}; return arguments[0].map(ending)"
    shown = show(page).execute_script(depth, names)
    assert shown == ["…tial.0.weight", "…al#2.0.weight", "fc.weight"]


@pytest.mark.slow
def test_compared_values_fit_a_narrow_screen(
    show: Open, browser: webdriver.Chrome, run: Run, tmp_path: Path
) -> None:
    target = write_comparison(compare([run, run]), [run, run], tmp_path / "compared.html")
    with sized(browser, 390):
        driver = show(target)
        table = "document.querySelector('#panel-what_differs .scroll')"
        assert driver.execute_script(f"return {table}.scrollWidth - {table}.clientWidth") == 0
        # A table of numbers scrolls instead: its words are not torn.
        lines = driver.execute_script("""
          return [...document.querySelectorAll("#panel-step_time tbody th")].map((head) => {
            const range = document.createRange();
            range.selectNodeContents(head);
            return new Set([...range.getClientRects()].map(({ top }) => top)).size;
          });
        """)
        assert lines == [1] * 5


@pytest.mark.slow
def test_every_axis_of_steps_is_the_whole_run(
    show: Open, page: Path, run: Run, full: Source, tmp_path: Path
) -> None:
    for path, last in ((page, LAST), (write_report(full.run, [], tmp_path / "p.html"), full.step_range[1])):
        driver = show(path)
        ranges = driver.execute_script(f"return {ACROSS}.map(({{scales}}) => [scales.x.min, scales.x.max])")
        assert len(ranges) > 4
        assert {tuple(ends) for ends in ranges} == {(0, last)}


def uneven_columns(driver: webdriver.Chrome, first: int, last: int) -> dict[str, int]:
    """Return by panel how many columns between two steps differ from the first of them: grids run through."""
    return driver.execute_script(
        f"""
        {COPIED}
        const charts = {ACROSS};
        const [first, last] = arguments;
        return Object.fromEntries(charts.map((plot) => {{
          const {{ bbox }} = plot;
          const [from, to] = [first, last].map((step) => Math.round(plot.valToPos(step, "x", true)));
          const {{ data }} = copied(plot).getImageData(from, bbox.top + 8, to - from, bbox.height - 16);
          let uneven = 0;
          for (let x = 1; x < to - from; x += 1) {{
            for (let y = 0; y < bbox.height - 16; y += 1) {{
              const at = 4 * y * (to - from);
              const apart = (channel) => Math.abs(data[at + 4 * x + channel] - data[at + channel]);
              if ([0, 1, 2, 3].some((channel) => apart(channel) > 90)) {{
                uneven += 1;
                break;
              }}
            }}
          }}
          return [plot.root.closest(".panel").id.slice(6), uneven];
        }}));
        """,
        first,
        last,
    )


@pytest.mark.slow
def test_nothing_is_drawn_over_a_gap(show: Open, page: Path) -> None:
    driver = show(page)
    inside = uneven_columns(driver, 20, 90)
    assert set(inside) == {"loss", "total_norm", "updates", "learning_rates", "health", "phases"}
    assert min(inside.values()) > 10
    for first, last in ((110, 190), (210, 290), (410, LAST - 9)):
        between = uneven_columns(driver, first, last)
        assert not any(between.values()), (first, between)
    single = uneven_columns(driver, 195, 205)
    assert min(single.values()) > 0, single
    legends = driver.find_elements(By.CSS_SELECTOR, ".legend-mark.sample")
    assert {legend.text for legend in legends} == {"recorded every 10 steps"}
    # Dots, which leave most columns of a sample's stretch empty at the height of the line.
    share = driver.execute_script(
        f"""
        {COPIED}
        const plot = {ACROSS}[0];
        const [from, to] = [305, 395].map((step) => Math.round(plot.valToPos(step, "x", true)));
        const {{ bbox }} = plot;
        const {{ data }} = copied(plot).getImageData(from, bbox.top, to - from, bbox.height);
        let drawn = 0;
        for (let x = 0; x < to - from; x += 1) {{
          for (let y = 0; y < bbox.height; y += 1) {{
            const at = 4 * (y * (to - from) + x);
            if (data[at + 3] > 120 && Math.abs(data[at] - data[at + 1]) > 25) {{ drawn += 1; break; }}
          }}
        }}
        return drawn / (to - from);
        """
    )
    assert 0.1 < share < 0.85


@pytest.mark.slow
def test_cold_first_step_is_marked_beyond_the_axis_until_asked_for(show: Open, page: Path) -> None:
    driver = show(page)
    top = "return document.querySelector('#panel-phases .plot').plot.scales.left.max"
    assert 30 < driver.execute_script(top) < 60
    switch = driver.find_element(By.CSS_SELECTOR, "#panel-phases .switches label")
    assert switch.text == "in full, up to 9,032"
    switch.click()
    assert driver.execute_script(top) > 9000


@pytest.mark.slow
@pytest.mark.parametrize(("cold", "start"), [((0,), 10), ((0, 2, 3), 40), ((0, 50), 10)])
def test_the_label_of_a_cold_step_is_beside_the_wedges(
    show: Open, page: Path, cold: tuple[int, ...], start: int
) -> None:
    """A step is 10 px wide here, and the label 80 px."""
    label = f"""
      const [css, number, [cold]] = [() => "", String, arguments];
      {script("marks")}
      const found = [];
      const nothing = () => {{}};
      const ctx = {{
        beginPath: nothing, moveTo: nothing, lineTo: nothing, fill: nothing,
        measureText: () => ({{ width: 80 }}), fillText: (text, x) => found.push(text, x),
      }};
      const valToPos = (step) => 10 * step;
      const bbox = {{ left: 0, top: 0, width: 1000 }};
      const values = Array.from({{ length: 100 }}, (_, step) => (cold.includes(step) ? 900 - step : 1));
      const spec = {{ left: {{ top: 5 }}, lines: [{{ axis: "left", values }}], steps: [...values.keys()] }};
      drawBeyond({{ ctx, bbox, valToPos, scales: {{ x: {{ min: 0, max: 100 }} }} }}, spec);
      return found;
    """
    assert show(page).execute_script(label, cold) == ["900 at step 0", start]


def legends(driver: webdriver.Chrome) -> dict[str, str]:
    found = driver.find_elements(By.CSS_SELECTOR, ".panel:has(.uplot)")
    return {
        panel.get_attribute("id").removeprefix("panel-"): panel.find_element(By.CSS_SELECTOR, ".legend").text
        for panel in found
    }


def hover(driver: webdriver.Chrome, panel: str, step: int) -> None:
    over = driver.find_element(By.CSS_SELECTOR, f"#panel-{panel} .u-over")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    at = driver.execute_script(
        "return Math.round(document.querySelector(arguments[0]).plot.valToPos(arguments[1], 'x'))",
        f"#panel-{panel} .plot",
        step,
    )
    left = at - over.size["width"] // 2
    ActionChains(driver).move_to_element_with_offset(over, left, 0).perform()


@pytest.mark.slow
def test_cursor_is_one_on_all_axes_of_steps(show: Open, page: Path) -> None:
    driver = show(page)
    rest = legends(driver)
    assert "step 400" in rest["loss"]
    assert "1.2" in rest["loss"]
    hover(driver, "loss", 160)
    step = int(
        driver.execute_script(
            "return document.querySelector('#panel-loss .legend-step').textContent"
        ).split()[1]
    )
    assert abs(step - 160) < 3
    nearest = 99 if step < 150 else 200
    for panel, text in legends(driver).items():
        if panel == "depth":
            continue
        assert f"step {step}" in text, panel
        assert f" at {nearest}" in text, panel
    assert f"{2 - nearest / 500:g} at {nearest}" in legends(driver)["loss"]
    shown = driver.execute_script(
        f"return {ACROSS}.map((plot) => Math.round(plot.posToVal(plot.cursor.left, 'x')))"
    )
    assert max(abs(at - step) for at in shown) <= 1
    hover(driver, "updates", 50)
    wait(driver, lambda d: " at " not in legends(d)["loss"])
    canvas = driver.find_element(By.CSS_SELECTOR, "#heat-map .grid-over")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    ActionChains(driver).move_to_element(canvas).perform()
    pointed = driver.find_element(By.CSS_SELECTOR, "#heat-map .tip dt").text
    assert pointed in legends(driver)["health"]


BANDS = """
const shown = (node) => node.checkVisibility() && node.getBoundingClientRect().height > 0;
const content = `h1, h2, h3, h4, p, dl, ul, pre, canvas, table, select, input, button, summary, output,
  figcaption, .legend, .ramp-box, .cells`;
return [...document.querySelectorAll(".panel, .verdict, .finding")].filter(shown).map((card) => {
  const box = card.getBoundingClientRect();
  const parts = [...card.querySelectorAll(content)].filter(shown).map((node) => node.getBoundingClientRect());
  let [reach, widest] = [box.top, 0];
  for (const { top, bottom } of parts.sort((a, b) => a.top - b.top)) {
    widest = Math.max(widest, top - reach);
    reach = Math.max(reach, bottom);
  }
  return [card.id || card.className, Math.round(Math.max(widest, box.bottom - reach))];
});
"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_no_card_has_a_band_of_empty_space(
    show: Open, browser: webdriver.Chrome, full: Source, page: Path, tmp_path: Path, width: int
) -> None:
    full_page = write_report(full.run, [], tmp_path / "full.html", health=health_of(full.run))
    with sized(browser, width):
        for path in (page, full_page):
            driver = show(path)
            bands: dict[str, Any] = dict(driver.execute_script(BANDS))
            assert len(bands) > 5
            # The padding of a card and 24 px.
            assert {name: band for name, band in bands.items() if band > 44} == {}
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
            phases = "document.querySelector('#panel-phases .scroll')"
            assert driver.execute_script(f"return {phases}.scrollWidth - {phases}.clientWidth") == 0
            clipped = """return [...document.querySelectorAll('.plot')].filter((box) => box.plot &&
              Math.abs(box.plot.height - box.clientHeight) > 1).length"""
            assert driver.execute_script(clipped) == 0


@pytest.mark.slow
def test_what_never_changes_is_a_line_that_evidence_leads_to(show: Open, tmp_path: Path) -> None:
    scalars = {"loss": [1 / (1 + step) for step in range(20)], "lr/0/0": [0.01] * 20}
    run = build_run(tmp_path / "run", monitors=("health",), scalars=scalars)
    driver = show(write_page(render_page(source_of(run)), tmp_path / "page.html"))
    assert driver.find_element(By.ID, "stated").text.splitlines() == [
        "Without change", "Learning rate", "optimizer 0: 0.01 at every recorded step.",
    ]  # fmt: skip
    assert driver.find_elements(By.CSS_SELECTOR, "dt#panel-learning_rates")
    assert len(driver.find_elements(By.CSS_SELECTOR, ".uplot")) == 1
