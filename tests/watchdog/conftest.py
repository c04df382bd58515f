"""Fixtures of the tests of the watchdog: no models of earlier tests, and runtime directories of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from backlight.watchdog import runtime_dir
from observed_processes import Start, starting


@pytest.fixture(autouse=True)
def _only_new_models(only_new_models: None) -> None:
    """Names of parameters must not depend on earlier tests."""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parent of the runtime directories of the test, so that they can be counted."""
    base = tmp_path / "shared"
    base.mkdir(mode=0o700)
    monkeypatch.setattr(runtime_dir, "candidates", lambda: [base])
    return base


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a script in a process of its own, which ends with the test."""
    with starting() as start:
        yield start
