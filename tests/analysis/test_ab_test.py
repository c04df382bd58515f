"""Two interleaved commands: order, medians, errors that name the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backlight.analysis import ab_test
from backlight.analysis.ab_test import ABTestError, run_ab_test
from run_builder import build_steptime_run

TRAIN = """
import sys, torch
from backlight import clock

now = 0.0
clock.perf_counter = lambda: now  # a clock that only the lines below advance, however busy the machine is
clock.monotonic_ns = lambda: round(now * 1e9)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    now += 0.003 if "--slow" in sys.argv else 0.002
    model(torch.randn(2, 4)).sum().backward()
    now += 0.004
    optimizer.step()
"""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write runs in which B is 5 % slower in backward, on a machine of changing speed."""
    order: list[str] = []

    def run(
        command: str, line: Callable[[Path, int], list[str]], out: Path, steps: int, limit: float
    ) -> None:
        assert line(out, steps)[0] == sys.executable
        order.append(out.name)
        slowdown = 1.0 + 0.5 * (int(out.name[-1]) % 3)
        slower = 1.05 if out.name.startswith("b") else 1.0
        build_steptime_run(
            out,
            {"backward": 0.03 * slowdown * slower, "other": 0.02 * slowdown},
            steps=steps,
            seed=len(order),
        )

    monkeypatch.setattr(ab_test, "_run", run)
    return order


def test_interleaved_pairs_find_difference_on_noisy_machine(recorded: list[str]) -> None:
    progress: list[tuple[int, int]] = []
    result = run_ab_test(
        ("train.py", "python train.py --slow"), rounds=6, steps=40, limit=9,
        on_run=lambda done, of: progress.append((done, of)),
    )  # fmt: skip
    assert recorded[:4] == ["a-0", "b-0", "b-1", "a-1"]
    assert progress[-1] == (12, 12)
    rows = {row.name: row for row in result.times.rows}
    assert rows["step"].is_significant
    assert rows["step"].low <= 1.03 <= rows["step"].high
    assert rows["backward"].low <= 1.05 <= rows["backward"].high
    assert not rows["other"].is_significant
    assert result.times.counts == (6, 6)


@pytest.mark.slow
def test_a_run_that_is_never_steady_costs_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(
        command: str, line: Callable[[Path, int], list[str]], out: Path, steps: int, limit: float
    ) -> None:
        growing = {(step, "backward"): 0.03 * 1.1 ** (step - 15) for step in range(steps)}
        slower = 2.0 if out.name.startswith("b") else 1.0
        changes = growing if out.name == "a-1" else None
        build_steptime_run(
            out, {"backward": 0.03 * slower}, steps=steps, changes=changes, seed=int(out.name[-1])
        )

    monkeypatch.setattr(ab_test, "_run", run)
    result = run_ab_test(("train.py", "python train.py --slow"), rounds=5, steps=20, limit=9)
    (note,) = result.notes
    assert note.startswith("A, 1 of 5 runs: no steady part")
    assert result.times.rows[0].low <= 2.0 <= result.times.rows[0].high
    with pytest.raises(ABTestError, match=r"10 steps are too few to find a steady part.*raise --steps"):
        run_ab_test(("train.py", "python train.py --slow"), rounds=5, steps=10, limit=9)
    out = build_steptime_run(tmp_path / "short", {"backward": 0.03}, steps=5).path
    with pytest.raises(ABTestError, match=r"5 steps are too few.*ended before 30 steps: let it train longer"):
        ab_test._medians("train.py", out, 30)


@pytest.mark.parametrize(
    ("commands", "rounds", "message"),
    [
        (("ls -l", "train.py"), 3, "'ls -l': not a Python script; expected `python SCRIPT.py"),
        (("train.py", "python 'train.py"), 3, "No closing quotation"),
        (("train.py", ""), 3, "'': not a Python script"),
        (("train.py", "train.py"), 2, "--pairs 2: an interval takes 3"),
    ],
)
def test_invalid_command_or_rounds_are_refused(commands: tuple[str, str], rounds: int, message: str) -> None:
    with pytest.raises(ABTestError, match=message):
        run_ab_test(commands, rounds=rounds, steps=12, limit=9)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train.py --lr 1", ["train.py", "--lr", "1"]),
        ("python -u -m pkg.train x", ["-m", "pkg.train", "x"]),
        ("KEY=1 python3.11 -X dev train.py", ["train.py"]),
    ],
)
def test_command_runs_under_backlight_run(command: str, expected: list[str]) -> None:
    line = ab_test._watched_command(command)(Path("out"), 30)
    watched = line.index("backlight")
    assert line[watched - 1 : watched + 2] == ["-m", "backlight", "run"]
    assert line[-len(expected) :] == expected
    assert line[line.index("--steps") + 1] == "30"
    assert (line[0] == "env") == command.startswith("KEY")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "limit", "message"),
    [
        ("assert False, 'injected'", 60, r"'train.py': ended with exit code 1 .*: AssertionError: injected"),
        ("import time; time.sleep(60)", 0.5, r"'train.py': did not finish 12 steps in 0.5 s"),
    ],
)
def test_error_names_failed_command(program: str, limit: float, message: str, tmp_path: Path) -> None:
    with pytest.raises(ABTestError, match=message):
        ab_test._run("train.py", lambda *_: [sys.executable, "-c", program], tmp_path, 12, limit)


def test_failure_summary_ends_at_exception() -> None:
    message = "step 1\nTraceback:\n  File x\nValueError: no\nbacklight: run written\n"
    assert ab_test._last_lines(message) == "ValueError: no"
    assert ab_test._last_lines("one\ntwo\n\nbacklight: nothing was measured\n") == "one | two"
    assert ab_test._last_lines("") == "it printed nothing"


@pytest.mark.slow
@pytest.mark.usefixtures("recorded")
def test_json_of_an_assumed_variation(command: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = command("compare", "--ab", "train.py", "python train.py --slow", "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["times"]["variation"] == {"deviation": 0.0, "freedom": "Infinity"}
    assert answer["times"]["rows"][0]["verdict"] in answer["times"]["verdict"]


@pytest.mark.full
def test_cli_compares_two_scripts(
    tmp_path: Path, console_script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    sides = ("train.py", "python train.py --slow")
    done = console_script(tmp_path, "compare", "--ab", *sides, "--pairs", "3", "--steps", "20", "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["differences"] == ["--slow not given against given"]
    step = answer["times"]["rows"][0]
    assert (step["name"], step["verdict"]) == ("step", "slower")
    assert (step["first_ms"], step["second_ms"]) == (pytest.approx(6.0), pytest.approx(7.0))
    assert step["low"] == pytest.approx(7 / 6)
