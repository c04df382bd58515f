"""Import path of the synthetic runs, and the browser that opens their pages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

sys.path.insert(0, str(Path(__file__).parent))

from browser import CHROMEDRIVER, CHROMIUM, FLAGS, Open, wait
from growing import Grow, Growing
from synthetic import FULL, Plan, health_of, write_run

from backlight.report.source import Source


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    driver.set_script_timeout(20)
    yield driver
    driver.quit()


@pytest.fixture
def show(browser: webdriver.Chrome) -> Iterator[Open]:
    """Open a page and wait until it is ready; at the end the console must be empty."""

    def scheme(name: str) -> None:
        # Without animations: a scroll in progress on a busy machine would move the next click target.
        features = {"prefers-color-scheme": name, "prefers-reduced-motion": "reduce"}
        media = {"features": [{"name": feature, "value": value} for feature, value in features.items()]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def opened(path: Path) -> webdriver.Chrome:
        browser.get_log("browser")
        browser.get_log("performance")
        browser.get(path.as_uri())
        wait(browser, lambda d: d.execute_script("return document.documentElement.dataset.ready") == "yes")
        return browser

    scheme("light")
    yield opened
    browser.execute_script("try { localStorage.clear() } catch {}")
    assert [entry["message"] for entry in browser.get_log("browser")] == []


@pytest.fixture
def grow(tmp_path: Path) -> Iterator[Grow]:
    """Write a run with some steps under ``tmp_path``; at the end it is closed."""
    runs = []

    def written(steps: int = 3, name: str = "run", plan: Plan | None = None, **options: Any) -> Growing:
        runs.append(Growing(tmp_path / name, plan))
        runs[-1].steps(steps, **options)
        return runs[-1]

    yield written
    for run in runs:
        run.close()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Source:
    run = write_run(tmp_path_factory.mktemp("full") / "run", FULL)
    return Source(run, health=health_of(run))
