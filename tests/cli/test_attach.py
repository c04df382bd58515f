"""``backlight attach`` on dumps of the flight recorder; on processes: ``tests/monitors/stalls``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import backlight
from backlight.cli.commands.attach import print_stacks, process_answer, stack_lines
from backlight.cli.console import print_answer
from backlight.records import DiagnosisKind, Phase
from backlight.watchdog.attach import Attached, attach
from backlight.watchdog.stacks import Frame, StackSample, ThreadStack
from backlight.watchdog.text import Diagnosis
from flight_dumps import dumped, entry, write
from observed_processes import PY_SPY, Start, starting, wait_until_in

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


@pytest.mark.slow
def test_many_ranks_are_printed_in_part_without_full(command: Command, tmp_path: Path) -> None:
    waits = entry(number=2, state="started")
    for rank in range(40):
        write(tmp_path, rank, dumped(entry(), *([waits] if rank else []), world=40))
    _, out, _ = command("attach", "--flight-recorder", str(tmp_path))
    lines = out.splitlines()
    assert lines[0].startswith("BLOCKED: ")
    assert len(lines) <= 25
    assert lines[-1] == "note: and 30 more ranks: --full"
    _, out, _ = command("attach", "--full", "--flight-recorder", str(tmp_path))
    assert "rank 39: " in out


def test_threads_and_frames_are_printed_in_part_without_full(capsys: pytest.CaptureFixture[str]) -> None:
    frames = tuple(Frame("/home/me/train.py", line, "step") for line in range(30))
    threads = tuple(
        ThreadStack(7 + i, frames, name=f"thread {i}", tid=7 + i, native=(Frame("", 0, "sem_wait"),))
        for i in range(9)
    )
    diagnosis = Diagnosis(DiagnosisKind.BLOCKED, Phase.OTHER, "BLOCKED: waits", "it moves", "read the line")
    found = Attached(7, diagnosis, "tid  state\n", (StackSample(0, "py-spy", threads),), ("steps",))
    print_answer(process_answer(found), as_json=False, full=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "BLOCKED: waits"
    assert "    sem_wait (C)" in lines
    assert "    train.py:0 in step" in lines
    assert "    and 23 more frames, 8 other threads" in lines
    assert lines[-1] == "note: all threads and frames: --full"
    assert len(lines) <= 25
    print_answer(process_answer(found, full=True), as_json=False, full=True)
    assert len(capsys.readouterr().out.splitlines()) > 9 * 30


def test_stacks_of_one_kind_are_listed_once_and_those_of_backlight_counted() -> None:
    loop, wait = Frame("/home/me/train.py", 5, "main"), Frame("/lib/python3.11/threading.py", 331, "wait")
    watcher = Frame(backlight.__file__, 1, "run")
    threads = (
        *(ThreadStack(8 + i, (wait,) * 9, name=f"pool-{i}") for i in range(3)),
        ThreadStack(20, (wait, watcher), name="sampler"),
        ThreadStack(7, (loop,), name="MainThread", tid=7, holds_gil=True),
    )
    sample = StackSample(0, "py-spy", threads)
    lines = list(stack_lines(sample, 7))
    assert lines[:3] == [
        "  MainThread, holds the interpreter lock:",
        "    train.py:5 in main",
        "  pool-0 and 2 other threads:",
    ]
    assert lines[-2:] == ["    and 1 more frame", "  and 1 thread of backlight"]
    assert sum("threading.py:331" in line for line in stack_lines(sample, 7, full=True)) == 9


@PY_SPY
@pytest.mark.slow
def test_stacks_come_before_the_diagnosis(capfd: pytest.CaptureFixture[str]) -> None:
    with starting() as start:
        _stacks_come_first(start, capfd)


def _stacks_come_first(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    process = start("""
        import threading
        def stuck(lock):
            lock.acquire()
            lock.acquire()
        stuck(threading.Lock())
    """)
    wait_until_in(process, "stuck")
    print_answer(process_answer(attach(process.pid, 0.6)), as_json=False, full=True)
    alone = capfd.readouterr().out.splitlines()
    assert print_stacks(process.pid)
    first = capfd.readouterr().out.splitlines()
    assert first[0].startswith(f"process {process.pid}: ")
    assert first[1:] == [
        "  MainThread, waits for a lock:",
        "    <string>:5 in stuck",
        "    <string>:6 in <module>",
        "observing ...",
    ]
    assert alone[0].startswith("BLOCKED: the main thread waits for a lock at <string>:5 in stuck")
    assert not print_stacks(2**22 + 1)  # no process


@pytest.mark.slow
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
