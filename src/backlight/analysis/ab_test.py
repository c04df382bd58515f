"""Two commands run in turns, and the difference of their steps: what disturbs the machine disturbs both."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backlight.analysis.fingerprint_diff import differences
from backlight.launch.subprocess import run_in_own_session
from backlight.monitors.steptime.model.step_comparison import STEP, TimeComparison, compare_pairs
from backlight.monitors.steptime.model.step_times import read_phases
from backlight.store.read.run import RunFormatError, open_run

LINES_SHOWN = 3
"""Last lines of what a command printed that an error repeats."""


class AlternatingError(ValueError):
    """A command of an interleaved comparison could not be measured: which, why, and the way out."""


@dataclass(frozen=True)
class Alternated:
    """Two commands in turns.

    Attributes
    ----------
    commands:
        As they were given.
    rounds:
        Pairs of runs.
    medians:
        Median seconds of each run by phase, the whole step among them, by command.
    times:
        Their difference, the second over the first.
    differences:
        In words what differs between the two trainings, by their fingerprints.
    notes:
        What speaks against the numbers.
    """

    commands: tuple[str, str]
    rounds: int
    medians: tuple[tuple[dict[str, float], ...], tuple[dict[str, float], ...]]
    times: TimeComparison
    differences: tuple[str, ...]
    notes: tuple[str, ...]


def alternate(
    commands: tuple[str, str],
    *,
    rounds: int,
    steps: int,
    limit: float,
    on_run: Callable[[int, int], None] = lambda _done, _of: None,
) -> Alternated:
    """Run two commands in turns, the first one first in every other round, and compare their steps.

    Parameters
    ----------
    commands:
        Each a training: ``python train.py --lr 1``, ``python -m package.train`` or ``train.py``.
    rounds:
        Pairs, three or more.
    steps:
        Steps of each run, after which it is ended.
    limit:
        Seconds that one run may take.
    on_run:
        Called with the number of runs done and of all.

    Raises
    ------
    AlternatingError
        If a command is no Python script, fails, takes too long, or takes too few steps.
    """
    if rounds < 3:
        raise AlternatingError(f"--rounds {rounds}: an interval takes 3 pairs or more")
    lines = [_watched(command) for command in commands]
    medians: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    notes: dict[str, None] = {}
    said: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory(prefix="backlight-ab-") as folder:
        done = 0
        for number in range(rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                on_run(done, 2 * rounds)
                out = Path(folder) / f"{'ab'[which]}-{number}"
                _run(commands[which], lines[which], out, steps, limit)
                measured, trouble = _medians(commands[which], out)
                medians[which].append(measured)
                if trouble:
                    notes[f"{'AB'[which]}: {trouble}"] = None
                done += 1
            if number == 0:
                said = _told_apart(Path(folder) / "a-0", Path(folder) / "b-0")
        on_run(done, 2 * rounds)
    return Alternated(
        commands,
        rounds,
        (tuple(medians[0]), tuple(medians[1])),
        compare_pairs(medians[0], medians[1]),
        said,
        tuple(notes),
    )


def _watched(command: str) -> Callable[[Path, int], list[str]]:
    """Return what makes a command line under ``backlight run`` of a folder and a number of steps.

    Raises
    ------
    AlternatingError
        If it is no Python script.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise AlternatingError(f"{command!r}: {error}") from None
    settings: list[str] = []
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL):
        settings.append(words.pop(0))
    options: list[str] = []
    interpreter = sys.executable
    if words and re.fullmatch(r"(.*/)?python[\d.]*", words[0]):
        interpreter = words.pop(0) if "/" in words[0] else (words.pop(0), sys.executable)[1]
        while words and words[0].startswith("-") and words[0] != "-m":
            option = words.pop(0)
            options += [option, words.pop(0)] if option in {"-W", "-X"} and words else [option]
    if not words or not (words[0] == "-m" or words[0].endswith(".py") or Path(words[0]).is_dir()):
        raise AlternatingError(
            f"{command!r}: not a Python training; expected `python SCRIPT.py ...` or `python -m MODULE ...`"
        )
    before = ["env", *settings] if settings else []

    def line(out: Path, steps: int) -> list[str]:
        run = ["-m", "backlight", "run", "--monitors", "steptime", "--every", "1"]
        return [*before, interpreter, *options, *run, "--steps", str(steps), "--out", str(out), *words]

    return line


def _run(command: str, line: Callable[[Path, int], list[str]], out: Path, steps: int, limit: float) -> None:
    """Run one command to its end.

    Raises
    ------
    AlternatingError
        If it fails or takes too long.
    """
    began = time.monotonic()
    try:
        done = run_in_own_session(
            line(out, steps), limit=limit, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except subprocess.TimeoutExpired:
        raise AlternatingError(
            f"{command!r}: did not finish {steps} steps in {limit:g} s; raise --limit or lower --steps"
        ) from None
    if done.returncode:
        raise AlternatingError(
            f"{command!r}: ended with exit code {done.returncode} after {time.monotonic() - began:.1f} s: "
            f"{last_words(done.stdout)}"
        )


def last_words(said: str) -> str:
    """Return what a command said of its end: the exception, or else its last lines."""
    lines = [line for line in said.strip().splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b", line)]
    return (errors[-1] if errors else " | ".join(lines[-LINES_SHOWN:])) or "it printed nothing"


def _medians(command: str, out: Path) -> tuple[dict[str, float], str]:
    """Return the median seconds of the steady steps by phase, and what speaks against them.

    Raises
    ------
    AlternatingError
        If the run has no steady steps.
    """
    try:
        table = read_phases(open_run(out))
    except RunFormatError as error:
        raise AlternatingError(f"{command!r}: left no run behind: {error}") from None
    if table is None:
        raise AlternatingError(f"{command!r}: took no step of an optimizer after a backward")
    steady, rest = table.steady()
    if len(rest.steps) < 4:
        raise AlternatingError(f"{command!r}: {steady.trouble}; raise --steps")
    medians = {name: float(np.median(rest.phase(name))) for name in rest.names}
    return {STEP: float(np.median(rest.total)), **medians}, steady.trouble


def _told_apart(first: Path, second: Path) -> tuple[str, ...]:
    prints = open_run(first).fingerprint(), open_run(second).fingerprint()
    if prints[0] is None or prints[1] is None:
        return ()
    return tuple(difference.words for difference in differences(prints[0], prints[1]))


def words_of(result: Alternated) -> Sequence[str]:
    """Return what is to be said beside the table."""
    what = "; ".join(result.differences)
    return (
        f"they differ in: {what}" if what else "the two trainings have the same fingerprint",
        *result.notes,
    )
