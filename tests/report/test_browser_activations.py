"""Activations over depth in headless Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import NEEDS_CHROMIUM, Open, wait
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from synthetic import write_report

from injected_faults import FAULTS

pytestmark = [*NEEDS_CHROMIUM, pytest.mark.slow]


def test_the_cursor_names_the_layer(show: Open, tmp_path: Path) -> None:
    driver = show(write_report(FAULTS["activations"](tmp_path / "run"), [], tmp_path / "page.html"))
    panel = driver.find_element(By.ID, "panel-activations")
    driver.execute_script("arguments[0].scrollIntoView()", panel)
    canvas = wait(driver, lambda _: panel.find_element(By.TAG_NAME, "canvas"))
    ActionChains(driver).move_to_element(canvas).perform()
    wait(driver, lambda _: "relu" in panel.find_element(By.CLASS_NAME, "legend").text)
