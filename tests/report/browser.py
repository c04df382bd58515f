"""Headless Chromium for the tests of the page; the fixtures are in ``conftest.py``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")

NEEDS_CHROMIUM = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (CHROMIUM and CHROMEDRIVER),
        reason="Chromium or its driver is missing: apt-get install chromium-driver",
    ),
]

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1280,900 --force-device-scale-factor=1"
)
Open = Callable[[Path], webdriver.Chrome]


def wait(driver: webdriver.Chrome, until: Callable[[webdriver.Chrome], Any], seconds: float = 15) -> Any:
    try:
        return WebDriverWait(driver, seconds, 0.05).until(until)
    except TimeoutException:
        raise AssertionError(f"the condition was not met; console: {driver.get_log('browser')}") from None


def unfold(driver: webdriver.Chrome) -> None:
    """Open every fold of the page."""
    driver.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
