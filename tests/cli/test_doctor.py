"""``doctor``: what it says of the release of torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backlight.cli import doctor

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("version", "state", "meaning"),
    [
        ("", "missing", "pip install 'backlight[torch]'"),
        ("2.8.1", "missing", "expected 2.9 or newer"),
        ("2.13.0+cpu", "ok", "can be watched"),
        ("2.14.0", "limited", "newer than 2.13, the newest that is tested"),
    ],
)
def test_release_of_torch(version: str, state: str, meaning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: version)
    check = doctor._torch()
    assert check.state == state
    assert meaning in check.meaning


def test_newest_torch_is_the_pinned_one() -> None:
    pinned = re.search(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert tuple(map(int, pinned.groups())) == doctor.NEWEST_TORCH
