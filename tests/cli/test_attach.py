"""``backlight attach`` on dumps of the flight recorder; on processes: ``tests/monitors/stalls``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from monitors.stalls.model.test_flight_recorder import dumped, entry, write

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Rank 1 of three has not issued the second collective; rank 2 left no dump."""
    frames = [{"filename": "/home/me/train.py", "line": 12, "name": "main"}]
    write(tmp_path, 0, dumped(entry(), entry(number=2, state="started", frames=frames), world=3))
    write(tmp_path, 1, dumped(entry(), world=3), as_json=True)
    return tmp_path


def test_dumps_are_diagnosed(command: Command, dumps: Path) -> None:
    code, out, _ = command("attach", "--flight-recorder", str(dumps), "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["diagnosis"]["kind"], found["missing"]) == ("BLOCKED", [2])
    assert found["ranks"][0]["line"] == "/home/me/train.py:12"
    _, out, _ = command("attach", "--flight-recorder", str(dumps))
    assert "rank 0: 2 collectives" in out
    assert "rank 2 left no dump" in out


def test_run_adds_the_steps_of_its_ranks(command: Command, dumps: Path, run_with_nan: Path) -> None:
    code, out, _ = command("attach", "--flight-recorder", str(dumps), "--run", str(run_with_nan), "--json")
    assert code == 0
    first, second = json.loads(out)["ranks"]
    assert (first["step"] is not None, second["step"]) == (True, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected either the PID of a process or --flight-recorder DIR"),
        (["7", "--flight-recorder", "DIR"], "expected either the PID of a process or --flight-recorder DIR"),
        (["7", "--run", "DIR"], "--run goes with --flight-recorder"),
        (["--flight-recorder", "DIR"], "no dump of the flight recorder; expected one file per rank"),
        (["--flight-recorder", "DIR/missing"], "No such file or directory"),
    ],
)
def test_wrong_use_is_one_clear_error(
    arguments: list[str], words: str, command: Command, tmp_path: Path
) -> None:
    code, _, err = command("attach", *(a.replace("DIR", str(tmp_path)) for a in arguments))
    assert code == 2
    assert words in " ".join(err.replace("│", " ").split())
