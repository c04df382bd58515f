"""The page in headless Chromium: drawing, interaction, no requests, hostile names."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import NEEDS_CHROMIUM, Open, unfold, wait
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from synthetic import FULL, Plan, finding, health_of, write_report, write_run

from backlight.analysis.overlay import overlay, write_overlay
from backlight.analysis.report import source_of
from backlight.records import Evidence, Finding, Made, Severity
from backlight.report import page as pages
from backlight.report.page import render_page, write_page
from backlight.report.panel import Drawn, Panel, PanelWarning, in_order
from backlight.report.source import Source
from backlight.store.read.run import Run
from backlight.text import number
from grokking_runs import Grok, write_grokking_run

pytestmark = NEEDS_CHROMIUM

HOSTILE = "</script><img src=x onerror=document.title='owned'>"
PLAN = Plan(
    steps=300,
    nan_step=210,
    spike_step=77,
    vanishing_rows=(3, 4),
    dead_row=25,
    unmeasured={7: "frozen"},
    clip=0.02,
    scaler=True,
    histogram=True,
    phases=True,
    user={"accuracy": 0.9, "test_loss": 2.0},
    name="browser run",
)


def findings(run: Run) -> list[Finding]:
    names = [parameter.name for parameter in run.parameters()]
    vanishing = Evidence(f"series/gradient/rms/{names[3]}", 150, 1e-9, "gradient")
    clip, dump = Evidence("scalars/clip/factor", 120), Evidence("evidence/dump.txt")

    def about(rule: str, severity: Severity, evidence: Evidence) -> Finding:
        return finding(names[3], 150, rule=rule, severity=severity, evidence=(evidence,), made=Made.READER)

    return [
        finding(names[10], 210),
        about("vanishing", Severity.WARNING, vanishing),
        about("clip", Severity.WARNING, clip),
        about("dump", Severity.WARNING, dump),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("browser") / "run", PLAN)


@pytest.fixture(scope="module")
def page(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("page") / "report.html"
    return write_report(run, findings(run), target, health=health_of(run))


def cells(driver: webdriver.Chrome, selector: str = "#heat-map .grid-map") -> np.ndarray:
    """Return the pixels [H, W, 4] of a canvas, read from a copy."""
    size, data = driver.execute_script(
        "const c = document.querySelector(arguments[0]);"
        "const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', {willReadFrequently: true});"
        "copy.drawImage(c, 0, 0);"
        "const d = copy.getImageData(0, 0, c.width, c.height).data;"
        "let text = ''; for (let i = 0; i < d.length; i += 8192) "
        "text += String.fromCharCode.apply(null, d.subarray(i, i + 8192));"
        "return [[c.height, c.width, 4], btoa(text)];",
        selector,
    )
    return np.frombuffer(base64.b64decode(data), np.uint8).reshape(size)


def picture(driver: webdriver.Chrome) -> str:
    """Return the heat map as a data URL, for comparisons."""
    return str(driver.execute_script("return document.querySelector('#heat-map .grid-map').toDataURL()"))


def colour(driver: webdriver.Chrome, name: str) -> list[int]:
    text = driver.execute_script(
        "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0]).trim()", f"--{name}"
    )
    return [int(text[i : i + 2], 16) for i in (1, 3, 5)]


def top_of(driver: webdriver.Chrome, element: WebElement) -> float:
    return driver.execute_script("return arguments[0].getBoundingClientRect().top", element)


def text_of(driver: webdriver.Chrome, selector: str) -> str:
    return driver.find_element(By.CSS_SELECTOR, selector).text


def share_of(pixels: np.ndarray, wanted: list[int]) -> float:
    return float((pixels[..., :3] == wanted).all(axis=-1).mean())


@pytest.mark.slow
def test_a_bar_of_the_flame_graph_spreads(show: Open, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", replace(FULL, steps=20))
    driver = show(write_report(run, [], tmp_path / "report.html"))
    graph = driver.find_element(By.CSS_SELECTOR, ".flame")
    bars = {bar.text: bar for bar in graph.find_elements(By.TAG_NAME, "button")}

    def share(name: str) -> float:
        return bars[name].rect["width"] / graph.rect["width"]

    caller, line, other = "main (train.py:20) 3.5 ms", "mix (train.py:9) 3 ms", "main (train.py:30) 0.5 ms"
    assert (share(caller), share(line)) == (pytest.approx(0.875, abs=0.01), pytest.approx(0.75, abs=0.01))
    assert bars[line].rect["y"] < bars[caller].rect["y"]
    bars[line].click()
    assert (share(caller), share(line)) == (pytest.approx(1, abs=0.01), pytest.approx(1, abs=0.01))
    assert not bars[other].is_displayed()
    bars[line].click()
    assert share(line) == pytest.approx(0.75, abs=0.01)
    assert bars[other].is_displayed()


@pytest.mark.slow
def test_every_panel_is_drawn_and_controls_are_labelled(show: Open, page: Path, run: Run) -> None:
    driver = show(page)
    sent = [
        json.loads(entry["message"])["message"]["params"]
        for entry in driver.get_log("performance")
        if '"Network.requestWillBeSent"' in entry["message"]
    ]
    # The start page of the browser makes requests as well.
    requested = [each["request"]["url"] for each in sent if not each["documentURL"].startswith("chrome:")]
    assert [url.split(":")[0] for url in requested] == ["file"]
    assert driver.find_element(By.TAG_NAME, "h1").text == findings(run)[0].title.replace("`", "")
    assert text_of(driver, ".headline p").startswith("1 error, 3 warnings. ")
    assert driver.title == "browser run · backlight"
    empty = "[...document.querySelectorAll('.panel-body')].filter((b) => !b.children.length).length"
    assert driver.execute_script(f"return {empty}") == 0
    charts = driver.execute_script(
        "return [...document.querySelectorAll('.uplot canvas')].map((c) => {"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; })"
    )
    assert len(charts) == 14
    assert min(charts) > 500
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    nameless = driver.execute_script("""
        const named = (e) => e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length;
        const operated = [...document.querySelectorAll('button, a, input, select, [tabindex="0"]')];
        return operated.filter((e) => e.offsetParent && !named(e)).map((e) => e.outerHTML);
    """)
    assert nameless == []
    words = (Path(__file__).parents[2] / "src/backlight/report/assets/words.js").read_text()
    values = [0, 1, 12345, 12345.5, 0.0123456, 1.2e-9, 3e20, -0.5, 99999.5, 0.001, 123456789.0, 9.9996]
    shown = driver.execute_script(f"{words}; return arguments[0].map((value) => number(value));", values)
    assert shown == [number(float(value)) for value in values]


@pytest.mark.slow
def test_heat_map_distinguishes_values_zeros_gaps_and_nan(show: Open, page: Path) -> None:
    driver = show(page)
    pixels = cells(driver)
    assert share_of(pixels, colour(driver, "cell-broken")) > 0.05
    assert share_of(pixels, colour(driver, "cell-zero")) > 0.005
    assert share_of(pixels, colour(driver, "cell-hatch")) > 0.001
    assert len(np.unique(np.ascontiguousarray(pixels).view(np.uint32))) > 60
    legend = text_of(driver, ".map-legend")
    assert {"not measured", "exactly zero", "NaN or Inf"} <= set(legend.splitlines())


@pytest.mark.slow
def test_heat_map_separates_the_blocks_of_the_model(show: Open, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=20, blocks=3))
    driver = show(write_report(run, [], tmp_path / "report.html"))
    pixels = cells(driver)[:, -200:-100, :3]
    empty = (pixels == colour(driver, "card")).all(axis=(1, 2)).astype(int)
    names = [record.name for record in run.parameters()]
    blocks = dict.fromkeys(re.match(r"\w+(\.\d+)?", name)[0] for name in names)  # type: ignore[index]
    assert list(blocks) == ["embed", "blocks.0", "blocks.1", "blocks.2", "ln_f"]
    # One gap between neighbours; above the first row and below the last nothing is drawn.
    assert int((np.diff(empty[6 : 6 + 13 * len(names)]) > 0).sum()) == len(blocks) - 1


@pytest.mark.slow
def test_heat_map_changes_with_the_column(show: Open, page: Path) -> None:
    driver = show(page)
    before = picture(driver)
    options = driver.find_elements(By.CSS_SELECTOR, "#column option")
    assert [o.text for o in options] == ["rms", "largest |g|", "zeros", "NaN and Inf", "update / weight"]
    for option in options[2:4]:
        option.click()
        wait(driver, lambda d, before=before: picture(d) != before)
        before = picture(driver)


@pytest.mark.slow
def test_click_on_a_finding_shows_its_evidence(show: Open, page: Path) -> None:
    driver = show(page)
    section = driver.find_element(By.ID, "panel-parameters")
    assert top_of(driver, section) > 900
    driver.find_element(By.CSS_SELECTOR, ".finding.warning a.title[href$='panel-parameters']").click()
    wait(driver, lambda d: 0 <= top_of(d, section) < 200)
    assert text_of(driver, ".range").startswith("steps 140 to 160")
    assert driver.find_element(By.CSS_SELECTOR, ".detail h3").text == "blocks.0.attn.qkv.weight"
    chosen = driver.find_element(By.CSS_SELECTOR, "#roster tr.chosen")
    assert chosen.get_attribute("data-row") == "3"
    assert driver.switch_to.active_element == section
    unfold(driver)
    driver.execute_script("scrollTo(0, 0)")
    driver.find_element(By.CSS_SELECTOR, ".finding.error .label").click()
    column = driver.find_element(By.ID, "column")
    wait(driver, lambda _: column.get_attribute("value") == "non_finite")
    driver.execute_script("scrollTo(0, 0)")
    driver.find_element(By.LINK_TEXT, "clip factor").click()
    norms = driver.find_element(By.ID, "panel-total_norm")
    wait(driver, lambda d: 0 <= top_of(d, norms) < 300)
    assert text_of(driver, ".range").startswith("steps 110 to 130")
    assert not driver.find_elements(By.LINK_TEXT, "evidence/dump.txt")


@pytest.mark.slow
def test_card_has_a_sparkline_and_the_snippet_of_its_fix(show: Open, tmp_path: Path, run: Run) -> None:
    (name, *_) = [parameter.name for parameter in run.parameters()]
    evidence = (Evidence(f"parameters/group/{name}"), Evidence("scalars/total_norm", 77, 3.0))
    fix = "Clip `g` first: `clip_grad_norm_(model.parameters(), 1.0)`. Then `<b>compare</b>`."
    one = finding(name, 77, evidence=evidence, fix=fix)
    driver = show(write_report(run, [one], tmp_path / "report.html"))
    line = driver.find_element(By.CSS_SELECTOR, ".finding .spark")
    label = "scalars/total_norm, steps 0 to 299; marked: step 77"
    assert line.get_attribute("aria-label") == label
    at = float(driver.find_element(By.CSS_SELECTOR, ".spark-mark").get_attribute("x1"))
    assert at == pytest.approx(160 * 77 / 299)
    assert driver.find_element(By.CSS_SELECTOR, ".spark-line").get_attribute("d").count("L") > 50
    assert text_of(driver, ".fix pre") == "clip_grad_norm_(model.parameters(), 1.0)"
    paragraphs = [text.text for text in driver.find_elements(By.CSS_SELECTOR, ".fix p")]
    assert paragraphs == ["Clip g first:", "Then <b>compare</b>."]
    assert not driver.find_element(By.CSS_SELECTOR, ".finding .evidence").is_displayed()
    evidence_fold, page_fold = driver.find_elements(By.CSS_SELECTOR, ".finding summary")
    evidence_fold.send_keys(Keys.ENTER)
    assert driver.find_element(By.CSS_SELECTOR, ".finding .evidence").is_displayed()
    page_fold.send_keys(Keys.ENTER)
    wait(driver, lambda d: text_of(d, ".finding .page h4") == "Symptom")


@pytest.mark.slow
def test_tooltip_has_the_recorded_value(show: Open, page: Path, run: Run) -> None:
    driver = show(page)
    canvas = driver.find_element(By.CSS_SELECTOR, "#heat-map .grid-over")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'}); arguments[0].focus()", canvas)
    canvas.send_keys(*([Keys.ARROW_DOWN] * 2), *([Keys.ARROW_RIGHT] * 5))
    tip = text_of(driver, "#heat-map .tip")
    frame = run.frame("gradient", "rms")
    value = frame.values[5, 2]
    assert tip.splitlines()[0] == frame.names[2]
    assert "step 5" in tip
    shown = float(tip.splitlines()[-1])
    # The map of this run is quantised to three digits.
    assert shown == pytest.approx(value, rel=6e-3)
    canvas.send_keys(Keys.ENTER)
    wait(driver, lambda d: d.find_element(By.CSS_SELECTOR, ".detail h3").text == frame.names[2])


@pytest.mark.full
def test_small_run_shows_six_digits(show: Open, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=12, blocks=1))
    driver = show(write_report(run, [], tmp_path / "report.html"))
    canvas = driver.find_element(By.CSS_SELECTOR, "#heat-map .grid-over")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'}); arguments[0].focus()", canvas)
    canvas.send_keys(*([Keys.ARROW_DOWN] * 4), *([Keys.ARROW_RIGHT] * 7))
    tip = text_of(driver, "#heat-map .tip")
    assert tip.splitlines()[-1] == number(float(run.frame("gradient", "rms").values[7, 4]), 6)


@pytest.mark.slow
def test_search_filters_map_and_table(show: Open, page: Path, run: Run) -> None:
    driver = show(page)
    search = driver.find_element(By.ID, "search")
    before = driver.execute_script("return document.querySelector('#heat-map canvas').height")
    search.send_keys("qkv blocks.2")
    wanted = [p.name for p in run.parameters() if "qkv" in p.name and "blocks.2" in p.name]
    wait(driver, lambda d: len(d.find_elements(By.CSS_SELECTOR, "#roster tbody tr")) == len(wanted))
    names = [cell.text for cell in driver.find_elements(By.CSS_SELECTOR, "#roster tbody th")]
    assert names == wanted
    assert driver.find_element(By.CSS_SELECTOR, ".found").text == f"{len(wanted)} of 51"
    assert driver.execute_script("return document.querySelector('#heat-map canvas').height") < before
    search.send_keys(Keys.ENTER)
    wait(driver, lambda d: d.find_element(By.CSS_SELECTOR, ".detail h3").text == wanted[0])
    search.clear()
    search.send_keys("no such parameter")
    wait(driver, lambda d: d.find_element(By.ID, "panel-parameters").text.count("No parameter matches") == 1)
    search.clear()
    search.send_keys("head.weight")
    wait(driver, lambda d: d.find_element(By.CSS_SELECTOR, "#roster tbody th").text == "embed.weight")


@pytest.mark.slow
def test_table_sorts_unmeasured_last(show: Open, page: Path) -> None:
    driver = show(page)
    head = next(h for h in driver.find_elements(By.CSS_SELECTOR, "#roster thead th") if "median" in h.text)
    for direction in ("descending", "ascending"):
        driver.execute_script("arguments[0].click()", head.find_element(By.TAG_NAME, "button"))
        assert head.get_attribute("aria-sort") == direction
        column = driver.execute_script(
            "return [...document.querySelectorAll('#roster tbody tr')]"
            ".map((row) => row.querySelectorAll('td')[3].textContent)"
        )
        assert column[-1] == "\N{EN DASH}"
        values = [float(text) for text in column[:-1]]
        assert values == sorted(values, reverse=direction == "descending")


@pytest.mark.slow
def test_drag_zooms_every_chart(show: Open, page: Path) -> None:
    driver = show(page)
    over = driver.find_element(By.CSS_SELECTOR, "#panel-total_norm .u-over")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    map_before = picture(driver)
    drag = ActionChains(driver).move_to_element_with_offset(over, -100, 0).click_and_hold()
    drag.move_by_offset(150, 5).release().perform()
    reset = driver.find_element(By.CSS_SELECTOR, ".range")
    wait(driver, lambda _: reset.is_displayed())
    assert re.fullmatch(r"steps \d+ to \d+ · show all", reset.text)
    assert picture(driver) != map_before
    reset.click()
    wait(driver, lambda _: not reset.is_displayed())
    assert picture(driver) == map_before


@pytest.mark.slow
def test_findings_are_marked_on_every_step_axis(show: Open, page: Path) -> None:
    driver = show(page)
    without = driver.execute_script(
        "return [...document.querySelectorAll('.panel')].filter((panel) => {"
        "const label = [...panel.querySelectorAll('.legend-mark.found-at')];"
        "return panel.querySelector('.uplot') && !label.some((entry) => !entry.hidden); }).map(({id}) => id)"
    )
    assert without == ["panel-memory_steps", "panel-depth"]  # their axes are allocations and the model
    reddish = colour(driver, "error")
    assert share_of(cells(driver, "#panel-loss canvas"), reddish) > 0
    assert share_of(cells(driver, "#heat-map .grid-over"), reddish) > 0


@pytest.mark.slow
def test_loss_is_smoothed_and_its_axis_switched_by_keyboard(show: Open, page: Path) -> None:
    driver = show(page)
    log, smooth = driver.find_elements(By.CSS_SELECTOR, "#panel-loss .switches input")

    def drawn() -> str:
        return driver.execute_script("return document.querySelector('#panel-loss canvas').toDataURL()")

    pictures = [drawn()]
    for switch in (log, smooth, log):
        driver.execute_script("arguments[0].focus()", switch)
        assert driver.execute_script("return getComputedStyle(document.activeElement).outlineStyle") != "none"
        switch.send_keys(Keys.SPACE)
        wait(driver, lambda _, before=pictures[-1]: drawn() != before)
        pictures.append(drawn())
    assert len(set(pictures)) == 4
    smooth.send_keys(Keys.SPACE)
    wait(driver, lambda _: drawn() == pictures[0])


@pytest.mark.slow
def test_hints_are_behind_a_fold(show: Open, run: Run, tmp_path: Path) -> None:
    hint = finding("embed.weight", 3, rule="bottleneck", monitor="steptime", severity=Severity.INFO)
    driver = show(write_report(run, [hint], tmp_path / "report.html"))
    fold = driver.find_element(By.ID, "hints")
    assert fold.is_displayed()
    assert not fold.find_element(By.TAG_NAME, "article").is_displayed()
    unfold(driver)
    assert fold.find_element(By.TAG_NAME, "article").is_displayed()


def contrast_is_enough(driver: webdriver.Chrome) -> None:
    """Check the contrast of text and background."""

    def light(name: str) -> float:
        linear = [
            (c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour(driver, name)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(front: str, back: str) -> float:
        high, low = sorted((light(front), light(back)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for back in ("card", "raised", "ground"):
        for front in ("ink", "ink-soft", "ink-faint", "accent"):
            assert contrast(front, back) >= 4.5, (front, back)
    for front in ("error", "warning", "info", "clear"):
        assert contrast(front, "card") >= 4.5, front
    for front in ("error", "warning", "info", "clear", "void"):
        assert contrast(front, f"{front}-soft") >= 4.5, front
    for front, back in (("accent", "accent-soft"), ("warning", "warning-soft")):
        assert contrast(front, back) >= 4.5, front
    places = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
    for tone in (*places, "loss", "health", "limit"):
        assert contrast(f"tone-{tone}", "card") >= 3, tone


@pytest.mark.slow
def test_theme_follows_system_and_button_with_contrast(
    show: Open, browser: webdriver.Chrome, page: Path
) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    driver = show(page)
    ground = "return getComputedStyle(document.body).backgroundColor"
    assert driver.execute_script(ground) == "rgb(14, 17, 22)"
    contrast_is_enough(driver)
    dark = picture(driver)
    driver.find_element(By.CSS_SELECTOR, ".theme").click()
    assert driver.execute_script(ground) == "rgb(244, 245, 247)"
    contrast_is_enough(driver)
    assert picture(driver) != dark
    assert driver.find_element(By.CSS_SELECTOR, ".theme").text == "Dark"


@pytest.mark.slow
def test_everything_is_reached_by_tab_with_a_visible_focus(show: Open, page: Path) -> None:
    driver = show(page)
    unfold(driver)
    wanted = driver.execute_script("""
        const operated = 'a[href], button, input, select, summary, [tabindex="0"]';
        window.reached = [];
        document.addEventListener("focusin", ({ target }) => {
          const { outlineStyle, outlineWidth } = getComputedStyle(target);
          window.reached.push([target, outlineStyle !== "none" && parseFloat(outlineWidth) >= 2]);
        });
        const shown = (e) => e.checkVisibility() && !e.closest("#roster");
        return [...document.querySelectorAll(operated)].filter(shown).length;
    """)
    keys = ActionChains(driver)
    for _ in range(wanted + 2 * len(driver.find_elements(By.CSS_SELECTOR, "#roster button"))):
        keys.send_keys(Keys.TAB)
    keys.perform()
    outside = "window.reached.filter(([e]) => !e.closest('#roster'))"
    assert driver.execute_script(f"return new Set({outside}.map(([e]) => e)).size") == wanted
    unseen = "window.reached.filter(([, seen]) => !seen).map(([e]) => e.outerHTML.slice(0, 200))"
    assert driver.execute_script(f"return {unseen}") == []


@pytest.mark.slow
def test_narrow_screen_scrolls_vertically_only(show: Open, browser: webdriver.Chrome, page: Path) -> None:
    phone = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        driver = show(page)
        width = driver.execute_script("return document.documentElement.scrollWidth")
        assert width <= 390
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_hostile_names_are_text(show: Open, tmp_path: Path) -> None:
    plan = Plan(
        steps=20,
        name=HOSTILE,
        rename={3: HOSTILE},
        unmeasured={3: HOSTILE},
        user={HOSTILE: 1.0},
        phases=True,
    )
    run = write_run(tmp_path / "run", plan)
    evidence = (Evidence(f"series/gradient/rms/{HOSTILE}", 2, HOSTILE, HOSTILE),)
    named = dict.fromkeys(("title", "detail", "fix", "refuted_if", "rule"), HOSTILE)
    bad = finding(HOSTILE, 2, evidence=evidence, **named)
    driver = show(write_report(run, [bad], tmp_path / "report.html", health=health_of(run)))
    assert driver.find_elements(By.TAG_NAME, "img") == []
    assert len(driver.find_elements(By.TAG_NAME, "script")) == 3
    assert driver.title == f"{HOSTILE} · backlight"
    assert driver.find_element(By.TAG_NAME, "h1").text == HOSTILE
    driver.find_element(By.CSS_SELECTOR, "h1 a.title").click()
    assert driver.find_element(By.CSS_SELECTOR, ".detail h3").text == HOSTILE
    canvas = driver.find_element(By.CSS_SELECTOR, "#heat-map .grid-over")
    canvas.send_keys(Keys.ARROW_DOWN)
    assert driver.find_elements(By.TAG_NAME, "img") == []


@pytest.mark.slow
def test_policy_blocks_an_injected_script(show: Open, tmp_path: Path, run: Run) -> None:
    target = write_report(run, [], tmp_path / "report.html")
    text = target.read_text().replace("</body>", "<script>document.title = 'owned'</script></body>")
    target.write_text(text)
    driver = show(target)
    assert driver.title != "owned"
    (message,) = driver.get_log("browser")
    assert "Content Security Policy" in message["message"]


@pytest.mark.slow
def test_empty_run_has_no_empty_chart(show: Open, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=5, gradients=False, updates=False))
    driver = show(write_report(run, [], tmp_path / "report.html"))
    assert driver.find_element(By.TAG_NAME, "h1").text == "Nothing was measured"
    assert "No optimizer step was seen" in text_of(driver, ".verdict")
    assert "Exponent histogram" in driver.find_element(By.ID, "not-measured").text
    assert driver.find_elements(By.ID, "heat-map") == []
    charts = driver.find_elements(By.CSS_SELECTOR, ".uplot")
    assert len(charts) == 2


@pytest.mark.slow
def test_failed_panel_shows_its_error(
    show: Open, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(source: Source) -> Drawn:
        raise LookupError("no <b>column</b>")

    known = [panel for panel in in_order() if panel.name in {"total_norm", "parameters"}]
    monkeypatch.setattr(
        pages, "in_order", lambda: [known[0], Panel("wrong", "Wrong", 2, (), failing), known[1]]
    )
    with pytest.warns(PanelWarning, match="LookupError"):
        driver = show(write_report(run, [], tmp_path / "report.html"))
    titles = [head.text for head in driver.find_elements(By.CSS_SELECTOR, "main > .panels h2")]
    assert titles == [known[0].title, "Wrong", known[1].title]
    text = text_of(driver, "#panel-wrong .empty")
    assert text == "Panel 'wrong' could not be drawn: LookupError: no <b>column</b>."
    assert driver.find_elements(By.CSS_SELECTOR, "#panel-total_norm .uplot")


@pytest.mark.slow
def test_many_findings_of_one_rule_are_folded(show: Open, tmp_path: Path, run: Run) -> None:
    similar = [finding(parameter.name, i) for i, parameter in enumerate(run.parameters())]
    driver = show(write_report(run, similar, tmp_path / "report.html"))
    # One is a part of the verdict.
    assert len(driver.find_elements(By.CSS_SELECTOR, ".finding")) == 4
    driver.find_element(By.XPATH, "//button[contains(., 'Show 47 more')]").click()
    assert len(driver.find_elements(By.CSS_SELECTOR, ".finding")) == 51


@pytest.mark.slow
def test_grokking_run_shows_times_and_control(show: Open, tmp_path: Path) -> None:
    run = write_grokking_run(tmp_path / "run")
    plan = Grok(control="random-labels", control_of=run.run_id, seed=3)
    write_grokking_run(tmp_path / "control", plan)
    source = source_of(run)
    driver = show(write_page(render_page(source), tmp_path / "page.html"))
    titles = [title.text for title in driver.find_elements(By.CSS_SELECTOR, ".panel h2")]
    assert titles[:5] == [
        "Learning curves",
        "Verdict on grokking",
        "Progress measures",
        "Correlation with the test accuracy",
        "Spectrum over time",
    ]
    legend = text_of(driver, "#panel-learning_curves .legend")
    assert {"memorised (30, 40]", "generalised (990, 1,000]", "test accuracy, control"} <= set(
        legend.splitlines()
    )
    unfold(driver)
    gaps = driver.find_element(By.ID, "not-measured").text
    assert "Monitors not watched" in gaps
    assert "Exponent histogram" not in gaps
    table = text_of(driver, "#panel-correlations table")
    assert "no conclusion: too few runs and controls" in table
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    # The interval of the second time is painted: its columns are green next to white ones.
    green = driver.execute_script(
        "const c = document.querySelector('#panel-learning_curves canvas');"
        "const d = c.getContext('2d').getImageData(0, Math.round(c.height / 3), c.width, 1).data;"
        "let n = 0; for (let i = 0; i < d.length; i += 4) "
        "n += d[i + 3] > 0 && d[i + 1] > d[i] + 20 && d[i + 1] > d[i + 2]; return n;"
    )
    assert 2 <= green <= 40
    driver.execute_script("scrollTo(0, 0)")
    driver.find_element(By.LINK_TEXT, "logged test_accuracy").click()
    assert driver.execute_script("return document.activeElement.id") == "panel-learning_curves"


@pytest.mark.slow
def test_overlaid_runs_are_one_page(show: Open, tmp_path: Path) -> None:
    runs = [
        write_grokking_run(tmp_path / name, Grok(generalises=at)) for name, at in (("a", 900), ("b", 1300))
    ]
    target = write_overlay(overlay(runs, align=True), tmp_path / "page.html")
    driver = show(target)
    assert driver.find_element(By.ID, "headline").text == "2 runs overlaid"
    charts = driver.find_elements(By.CSS_SELECTOR, ".uplot")
    assert len(charts) > 15
    legend = text_of(driver, "#panel-learning .legend")
    assert set(legend.splitlines()) >= {"a", "b"}
