"""``doctor``: what it says of the release of torch."""

from __future__ import annotations

import pytest

from backlight.cli import doctor


@pytest.mark.parametrize(
    ("version", "state", "meaning"),
    [
        ("", "missing", "pip install 'backlight[torch]'"),
        ("2.8.1", "missing", "expected 2.9 or newer"),
        ("2.13.0+cu130", "ok", "can be watched"),
        ("2.15.0", "ok", "can be watched"),
        ("2.16.0.dev20270101+cpu", "limited", "newer than 2.15, the newest that is tested"),
    ],
)
def test_release_of_torch(version: str, state: str, meaning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: version)
    check = doctor._torch()
    assert check.state == state
    assert meaning in check.meaning
