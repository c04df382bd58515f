"""The spectra on the page: steps and layers are selected by slider, list and keyboard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from browser import NEEDS_CHROMIUM, Open, wait
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from backlight.analysis.report import source_of
from backlight.report.page import render_page, write_page
from backlight.store.read.run import Run
from backlight.store.spectra import measurements, table
from backlight.text import number
from spectra_runs import STRENGTHS, Injected, write_spectra_run

pytestmark = NEEDS_CHROMIUM

QKV, UP, HEAD = STRENGTHS
HOSTILE = "</script><img src=x onerror=document.title='owned'>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    plan = Injected(steps=(0, 100, 200), strengths={QKV: STRENGTHS[QKV], UP: STRENGTHS[UP]})
    return write_spectra_run(tmp_path_factory.mktemp("spectra") / "run", plan)


@pytest.fixture(scope="module")
def page(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(render_page(source_of(run)), tmp_path_factory.mktemp("page") / "report.html")


def painted(driver: webdriver.Chrome) -> list[int]:
    """Return how many pixels each chart of the explorer has painted."""
    return driver.execute_script(
        "return [...document.querySelectorAll('#panel-spectra .uplot canvas')].map((c) => {"
        "const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', {willReadFrequently: true});"
        "copy.drawImage(c, 0, 0);"
        "const d = copy.getImageData(0, 0, c.width, c.height).data;"
        "let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; })"
    )


def figures(driver: webdriver.Chrome) -> dict[str, str]:
    rows = driver.find_elements(By.CSS_SELECTOR, "#spectra-figures div")
    return {
        row.find_element(By.TAG_NAME, "dt").text: row.find_element(By.TAG_NAME, "dd").text for row in rows
    }


def recorded(run: Run, parameter: str, step: int) -> dict[str, float]:
    return next(dict(m.numbers) for m in measurements(run, parameter) if m.step == step)


def readout(driver: webdriver.Chrome) -> str:
    return driver.find_element(By.CSS_SELECTOR, "output[for='spectra-step']").text


@pytest.mark.slow
def test_steps_and_layers_are_selected_by_keyboard(show: Open, page: Path, run: Run) -> None:
    driver = show(page)
    assert driver.find_element(By.ID, "headline").text.startswith("Median signal share of 3 layers: ")
    shown = painted(driver)
    assert len(shown) == 5
    assert min(shown) > 1000
    label = f"{UP} · 32 \N{MULTIPLICATION SIGN} 32"
    choice = Select(driver.find_element(By.ID, "spectra-layer"))
    assert choice.first_selected_option.text == label
    assert figures(driver)["noise edge"] == number(recorded(run, UP, 200)["edge"], 3)
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    slider = driver.find_element(By.ID, "spectra-step")
    slider.send_keys(Keys.ARROW_LEFT)
    assert readout(driver) == slider.get_attribute("aria-valuetext") == "step 100"
    assert figures(driver)["signal share"] == number(recorded(run, UP, 100)["signal_share"], 3)
    wait(driver, lambda d: painted(d) != shown)
    before = painted(driver)
    choice.select_by_value(QKV)
    body = driver.find_element(By.CSS_SELECTOR, "#panel-spectra .panel-body")
    wait(driver, lambda _: body.get_attribute("data-layer") == QKV)
    assert readout(driver) == "step 100"  # it is kept
    assert figures(driver)["noise scale"] == number(recorded(run, QKV, 100)["noise_scale"], 3)
    wait(driver, lambda d: painted(d) != before)


@pytest.mark.slow
def test_legend_shows_the_values_under_the_pointer(show: Open, page: Path, run: Run) -> None:
    driver = show(page)
    chart = driver.find_elements(By.CSS_SELECTOR, "#panel-spectra .chart")[2]
    over = chart.find_element(By.CSS_SELECTOR, ".u-over")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    width = over.size["width"]
    ActionChains(driver).move_to_element_with_offset(over, -width // 2 + 2, 0).perform()
    legend = chart.find_element(By.CSS_SELECTOR, ".legend")
    wait(driver, lambda _: "direction 1" in legend.text)
    stored = np.float32(table(run, 200, UP)["left_alignment"][0])
    assert number(float(stored)) in legend.text


@pytest.mark.slow
def test_play_runs_to_the_end(show: Open, page: Path) -> None:
    driver = show(page)
    button = driver.find_element(By.ID, "spectra-play")
    button.click()
    assert button.text == "Stop"
    assert readout(driver) == "step 0"
    wait(driver, lambda _: button.text == "Play")
    assert readout(driver) == "step 200"


@pytest.mark.slow
def test_layer_without_directions_shows_a_reason(show: Open, tmp_path: Path) -> None:
    plan = Injected(steps=(0,), shapes={HEAD: (330, 340)}, strengths={}, replicates=4)
    source = source_of(write_spectra_run(tmp_path / "run", plan))
    driver = show(write_page(render_page(source), tmp_path / "page.html"))
    reasons = [
        p.text for p in driver.find_elements(By.CSS_SELECTOR, "#panel-spectra .empty") if p.is_displayed()
    ]
    assert reasons == ["Nothing here was measured at this step."] * 5


@pytest.mark.full
def test_hostile_names_are_text(show: Open, tmp_path: Path) -> None:
    plan = Injected(steps=(0, 1), shapes={HOSTILE: (8, 9)}, strengths={HOSTILE: (5.0,)})
    source = source_of(write_spectra_run(tmp_path / "run", plan))
    driver = show(write_page(render_page(source), tmp_path / "page.html"))
    assert driver.find_elements(By.TAG_NAME, "img") == []
    assert driver.title == "spectra · backlight"
    option = Select(driver.find_element(By.ID, "spectra-layer")).first_selected_option
    assert option.get_attribute("value") == HOSTILE
