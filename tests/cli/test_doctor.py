"""``doctor``: the release of torch, and what is printed."""

from __future__ import annotations

import pytest

from backlight.cli import doctor
from backlight.cli.console import print_answer
from backlight.cli.doctor import Requirement, answer


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


CHECKS = [
    Requirement("torch", "ok", "2.13.0", "training scripts can be watched", required=True),
    Requirement("device", "ok", "CPU, 2 threads", ""),
    Requirement("disk", "limited", "0.5 GB free here", "use --max-disk"),
    *(Requirement(f"[{index}]", "optional", "no x", "use") for index in range(40)),
]


def test_verdict_comes_first_and_the_rest_is_left_to_full(capsys: pytest.CaptureFixture[str]) -> None:
    print_answer(answer(CHECKS), as_json=False)
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first == "✓ Training scripts can be watched here: torch 2.13.0, CPU, 2 threads."
    assert second == "  disk: 0.5 GB free here; use --max-disk"
    assert len(rest) <= 23
    assert rest[-1] == "Tables: --full. All rows: --json."
    print_answer(answer(CHECKS), as_json=False, full=True)
    assert len(capsys.readouterr().out.splitlines()) > 40


def test_missing_torch_is_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    missing = Requirement(
        "torch", "missing", "not installed", "runs can be read, not recorded", required=True
    )
    print_answer(answer([missing]), as_json=False)
    line = capsys.readouterr().out.splitlines()[0]
    assert line == "✕ torch: not installed; runs can be read, not recorded"
