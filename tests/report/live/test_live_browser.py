"""The live page in headless Chromium: it follows a run and keeps the state of the view."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import NEEDS_CHROMIUM, wait
from growing import Grow
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from synthetic import Plan

from backlight.analysis.live import Live, followed
from backlight.records import RunStatus
from backlight.store.errors import RunFormatError
from backlight.store.read.run import open_run

pytestmark = NEEDS_CHROMIUM

Look = Callable[[Sequence[Path]], webdriver.Chrome]

SCRIPT = """
import select, sys, time
import torch
import backlight
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with backlight.watch(model, optimizer, run=sys.argv[1], every=1):
    for step in range(10_000):
        optimizer.zero_grad()
        data = torch.randn(32, 16)
        nn.functional.cross_entropy(model(data), data[:, :4].argmax(1)).backward()
        command = sys.stdin.readline() if select.select([sys.stdin], [], [], 0)[0] else ""
        if command == "nan\\n":
            model[2].weight.grad[0, 0] = float("nan")
            print(step, flush=True)
        optimizer.step()
        time.sleep(0.02)
        if command == "end\\n":
            break
"""


@contextmanager
def serving(paths: Sequence[Path]) -> Iterator[Live]:
    live = Live(followed(paths))
    thread = threading.Thread(target=live.run)
    thread.start()
    try:
        yield live
    finally:
        live.close()
        thread.join(timeout=20)
    assert not thread.is_alive()


@pytest.fixture
def look(browser: webdriver.Chrome) -> Iterator[Look]:
    """Serve runs and open their page; at the end the console is empty and no other host was requested."""
    lives: list[Live] = []
    with ExitStack() as stack:

        def opened(paths: Sequence[Path]) -> webdriver.Chrome:
            lives.append(stack.enter_context(serving(paths)))
            browser.get_log("browser")
            browser.get_log("performance")
            features = [
                {"name": "prefers-color-scheme", "value": "light"},
                {"name": "prefers-reduced-motion", "value": "reduce"},
            ]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            browser.get(lives[-1].new_address())
            return browser

        yield opened
        console = [entry["message"] for entry in browser.get_log("browser")]
        sent = [request for request in requests(browser) if request["url"].startswith("http")]
        browser.get("about:blank")
    assert console == []
    hosts = {f"127.0.0.1:{live.server.port}" for live in lives}
    assert {request["url"].split("/")[2] for request in sent} <= hosts
    assert {request["method"] for request in sent} <= {"GET"}


def requests(driver: webdriver.Chrome) -> list[dict[str, Any]]:
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [m["params"]["request"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def fact(driver: webdriver.Chrome, name: str) -> str:
    return str(driver.execute_script(f"return document.documentElement.dataset.{name} ?? ''"))


def until_version(driver: webdriver.Chrome, after: str = "") -> str:
    """Wait until the whole screen shows a version after ``after``."""
    wait(driver, lambda d: fact(d, "ready") == "yes" and fact(d, "version") not in {"", after})
    return fact(driver, "version")


def figure(driver: webdriver.Chrome, label: str) -> str:
    return str(
        driver.execute_script(
            "return [...document.querySelectorAll('.figures > div')]"
            ".find((d) => d.querySelector('dt').textContent === arguments[0])"
            "?.querySelector('dd').textContent ?? ''",
            label,
        )
    )


@pytest.mark.alone
@pytest.mark.full
def test_page_follows_a_run_to_its_end(look: Look, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    driver = look([path])
    wait(driver, lambda d: fact(d, "stand") == "waiting")
    assert "No run began" in driver.find_element(By.CSS_SELECTOR, ".verdict").text
    path.rmdir()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        wait(driver, lambda d: fact(d, "stand") == "running", 60)
        until_version(driver)
        recorded = int(figure(driver, "steps recorded") or 0)
        wait(driver, lambda d: int(figure(d, "steps recorded") or 0) > recorded)
        assert driver.find_elements(By.CSS_SELECTOR, "#panel-total_norm canvas")
        process.stdin.write(b"nan\n")
        process.stdin.flush()
        injected = int(process.stdout.readline())
        stored = stored_at(path, injected)
        wait(driver, lambda d: d.find_elements(By.CSS_SELECTOR, "article.finding.error"), 30)
        assert time.monotonic() - stored < 2.0
        assert f"from step {injected} on" in driver.find_element(By.ID, "headline").text
        assert "fresh" in driver.find_element(By.CSS_SELECTOR, "article.finding").get_attribute("class")
        assert process.poll() is None
    finally:
        process.communicate(b"end\n", timeout=60)
    assert process.returncode == 0
    wait(driver, lambda d: fact(d, "stand") == "finished", 30)
    until_version(driver)
    time.sleep(0.5)
    requests(driver)
    time.sleep(1.5)
    assert requests(driver) == []


def stored_at(path: Path, step: int) -> float:
    """Wait until ``step`` is in the run directory and return the time."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if open_run(path).last_step() >= step:
                return time.monotonic()
        except RunFormatError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"step {step} was never stored")


@pytest.mark.slow
def test_view_state_is_kept_while_the_run_grows(look: Look, grow: Grow) -> None:
    run = grow(120, plan=Plan(steps=400, blocks=2))
    driver = look([run.path])
    version = until_version(driver)
    search = driver.find_element(By.ID, "search")
    search.send_keys("mlp")
    driver.find_element(By.CSS_SELECTOR, "#roster tbody tr[data-row='9'] button").click()
    driver.find_element(By.CSS_SELECTOR, "#heat-map .grid-over").send_keys("+")
    chip = driver.find_element(By.CSS_SELECTOR, "button.range")
    wait(driver, lambda d: chip.is_displayed())
    zoomed = chip.text
    entry = driver.find_element(By.CSS_SELECTOR, "#panel-phases .legend-entry")
    driver.execute_script("arguments[0].click()", entry)
    for checkbox in driver.find_elements(By.CSS_SELECTOR, "#panel-loss .switches input"):
        driver.execute_script("arguments[0].click()", checkbox)
    driver.find_elements(By.CSS_SELECTOR, "#roster thead button")[3].click()
    position = "return document.querySelector('#panel-updates').getBoundingClientRect().top"
    choice = driver.find_element(By.ID, "column")
    for key in (Keys.ARROW_DOWN, Keys.ARROW_DOWN):
        choice.send_keys(key)
    wait(driver, lambda d: "exactly zero" in d.find_element(By.CSS_SELECTOR, "#panel-parameters .hint").text)
    driver.execute_script("scrollTo(0, document.querySelector('#panel-updates').offsetTop)")
    before = driver.execute_script(position)
    nodes = driver.execute_script("return document.getElementsByTagName('*').length")
    for _ in range(2):
        run.steps(40)
        version = until_version(driver, version)
    wait(driver, lambda d: figure(d, "steps recorded") == "200")  # a version may have fewer than all 40 steps
    assert abs(driver.execute_script(position) - before) <= 2
    assert chip.text == zoomed
    assert search.get_attribute("value") == "mlp"
    assert driver.find_element(By.CSS_SELECTOR, ".detail h3").text == run.names[9]
    assert entry.get_attribute("aria-pressed") == "false"
    assert choice.get_attribute("value") == "zero_share"
    assert len(driver.find_elements(By.CSS_SELECTOR, "#panel-loss .switches input:checked")) == 2
    scale = "return document.querySelector('#panel-loss .plot').plot.scales.left.distr"
    assert driver.execute_script(scale) == 3  # logarithmic
    sorted_by = driver.find_elements(By.CSS_SELECTOR, "#roster [aria-sort=descending]")
    assert [head.text for head in sorted_by] == ["rms, last"]
    # Nodes are replaced, not added.
    assert driver.execute_script("return document.getElementsByTagName('*').length") <= 1.05 * nodes
    chip.click()
    wait(driver, lambda d: not chip.is_displayed())


@pytest.mark.slow
def test_card_stays_open_while_its_sparkline_grows(look: Look, grow: Grow) -> None:
    run = grow(40)
    run.steps(5, broken=2)
    driver = look([run.path])
    version = until_version(driver)
    summary = driver.find_element(By.CSS_SELECTOR, ".finding.error summary")
    summary.send_keys(Keys.ENTER)

    def line(_: webdriver.Chrome) -> str:
        return str(driver.find_element(By.CSS_SELECTOR, ".finding.error .spark").get_attribute("aria-label"))

    before = line(driver)
    run.steps(20)
    until_version(driver, version)
    wait(driver, lambda d: line(d) != before)
    assert driver.switch_to.active_element == summary
    assert driver.find_element(By.CSS_SELECTOR, ".finding.error .evidence").is_displayed()


@pytest.mark.full
def test_offscreen_panels_are_updated_on_scroll(look: Look, grow: Grow) -> None:
    run = grow(30, plan=Plan(steps=100, blocks=1))
    driver = look([run.path])
    version = until_version(driver)
    requests(driver)
    run.steps(10)
    until_version(driver, version)
    sent = " ".join(request["url"] for request in requests(driver))
    assert "/panel/loss?" in sent
    assert "/panel/phases?" not in sent
    driver.execute_script("document.querySelector('#panel-phases').scrollIntoView({behavior: 'instant'})")
    wait(driver, lambda d: any("/panel/phases?" in request["url"] for request in requests(d)))


@pytest.mark.slow
def test_overlay_links_to_the_page_of_each_run(look: Look, grow: Grow) -> None:
    runs = [grow(20, name) for name in ("small", "large")]
    driver = look([run.path for run in runs])
    until_version(driver)
    assert driver.find_element(By.TAG_NAME, "h1").text == "2 runs overlaid"
    assert not driver.find_element(By.ID, "details").is_displayed()  # nothing is in it
    assert not driver.find_elements(By.LINK_TEXT, "Details")
    legend = "#panel-loss .legend-entry:not([hidden]) .legend-name"
    wait(
        driver,
        lambda d: [name.text for name in d.find_elements(By.CSS_SELECTOR, legend)] == ["small", "large"],
    )
    # Equal curves: the second is dashed, so that it does not hide the first.
    swatches = driver.find_elements(By.CSS_SELECTOR, "#panel-loss .legend-entry:not([hidden]) .swatch")
    assert ["dashed" in (swatch.get_attribute("class") or "") for swatch in swatches] == [False, True]
    views = driver.find_elements(By.CSS_SELECTOR, ".views a")
    assert [view.text for view in views] == ["2 runs", "small", "large"]
    views[2].click()
    wait(driver, lambda d: d.title == "● large · backlight")
    until_version(driver)
    runs[1].close(RunStatus.FAILED)
    wait(driver, lambda d: fact(d, "stand") == "failed")
    assert driver.title == "large · backlight"


@pytest.mark.full
def test_theme_button_switches_colours(look: Look, grow: Grow) -> None:
    run = grow(10)
    driver = look([run.path])
    until_version(driver)
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = driver.execute_script(ground)
    driver.find_element(By.CSS_SELECTOR, "button.theme").click()
    dark = driver.execute_script(ground)
    assert light == "rgb(244, 245, 247)"
    assert dark == "rgb(14, 17, 22)"
    driver.execute_script("try { localStorage.clear() } catch {}")


@pytest.mark.full
def test_closed_server_is_reported_and_content_stays(look: Look, grow: Grow) -> None:
    run = grow(10)
    driver = look([run.path])  # for the checks of the fixture
    with serving([run.path]) as live:
        driver.get(live.new_address())
        until_version(driver)
    wait(driver, lambda d: fact(d, "stand") == "lost")
    assert "was closed" in driver.find_element(By.ID, "saying").text
    assert figure(driver, "steps recorded") == "10"
    driver.get("about:blank")
    driver.get_log("browser")  # contains the refused connection
    driver.get_log("performance")


@pytest.mark.slow
def test_wrong_token_shows_why_and_nothing_of_the_run(browser: webdriver.Chrome, grow: Grow) -> None:
    run = grow(3)
    with serving([run.path]) as live:
        browser.get(live.new_address()[:-2] + "__")
        assert browser.find_elements(By.CSS_SELECTOR, "#report, main, noscript") == []
        assert "This link has been used" in browser.find_element(By.TAG_NAME, "h1").text
    browser.get("about:blank")
    browser.get_log("browser")


@pytest.mark.slow
def test_noscript_page_names_the_report_command(look: Look, grow: Grow) -> None:
    run = grow(3)
    driver = look([run.path])
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        driver.refresh()
        assert "backlight report RUN" in driver.find_element(By.TAG_NAME, "body").text
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
