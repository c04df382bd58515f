"""Interleaved A/B test of two commands: what disturbs the machine disturbs the steps of both."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backlight.analysis.fingerprint_diff import differences
from backlight.launch.subprocess import run_in_own_session
from backlight.monitors.steptime.model.step_comparison import STEP, TimeComparison, compare_pairs, interleave
from backlight.monitors.steptime.model.step_times import MIN_STEPS, WINDOW_STEPS, read_phases
from backlight.store.read.run import RunFormatError, open_run

LINES_SHOWN = 3
"""Last lines of a command's output that an error repeats."""


class ABTestError(ValueError):
    """A command could not be measured: which, why, and the fix."""


@dataclass(frozen=True)
class ABTest:
    """Two interleaved commands: ``rounds`` pairs of runs, and their difference, the second over the first.

    ``medians`` are seconds of each run by phase, by command; ``differences`` are those of the fingerprints.
    """

    commands: tuple[str, str]
    rounds: int
    medians: tuple[tuple[dict[str, float], ...], ...]
    times: TimeComparison
    differences: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines next to the table."""
        what = "; ".join(self.differences)
        undecided = self.times.rows[0].verdict == "undecided"
        return (
            f"they differ in: {what}" if what else "their configurations agree",
            *self.notes,
            *(["more pairs narrow the interval: --pairs"] if undecided else []),
        )


def run_ab_test(
    commands: tuple[str, str],
    *,
    rounds: int,
    steps: int,
    limit: float,
    on_run: Callable[[int, int], None] = lambda _done, _of: None,
) -> ABTest:
    """Run two commands alternately in ``rounds`` pairs of ``steps`` each, and compare their steps."""
    if rounds < 3:
        raise ABTestError(f"--pairs {rounds}: an interval takes 3 pairs or more")
    lines = [_watched_command(command) for command in commands]
    troubles: tuple[list[str], list[str]] = ([], [])
    with tempfile.TemporaryDirectory(prefix="backlight-ab-") as folder:

        def measure(side: int, pair: int) -> dict[str, float]:
            out = Path(folder) / f"{'ab'[side]}-{pair}"
            _run(commands[side], lines[side], out, steps, limit)
            medians, trouble = _medians(commands[side], out, steps)
            if trouble:
                troubles[side].append(trouble)
            return medians

        sides = interleave(measure, rounds, on_run)
        stored = [open_run(Path(folder) / name).fingerprint() for name in ("a-0", "b-0")]
    prints = [each for each in stored if each is not None]
    differing = differences(prints) if len(prints) == 2 else []
    return ABTest(
        commands,
        rounds,
        tuple(tuple(side) for side in sides),
        compare_pairs(*sides),
        tuple(difference.text for difference in differing),
        tuple(
            f"{name}, {len(reasons)} of {rounds} runs: {reasons[0]}"
            for name, reasons in zip("AB", troubles, strict=True)
            if reasons
        ),
    )


def _watched_command(command: str) -> Callable[[Path, int], list[str]]:
    """Return a function from a run directory and a number of steps to the command under ``backlight run``."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ABTestError(f"{command!r}: {error}") from None
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
        raise ABTestError(
            f"{command!r}: not a Python script; expected `python SCRIPT.py ...` or `python -m MODULE ...`"
        )
    before = ["env", *settings] if settings else []

    def line(out: Path, steps: int) -> list[str]:
        run = ["-m", "backlight", "run", "--monitors", "steptime", "--every", "1"]
        return [*before, interpreter, *options, *run, "--steps", str(steps), "--out", str(out), *words]

    return line


def _run(command: str, line: Callable[[Path, int], list[str]], out: Path, steps: int, limit: float) -> None:
    """Run one command to its end; raise where it fails or takes too long."""
    began = time.monotonic()
    try:
        done = run_in_own_session(
            line(out, steps), limit=limit, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except subprocess.TimeoutExpired:
        raise ABTestError(
            f"{command!r}: did not finish {steps} steps in {limit:g} s; raise --limit or lower --steps"
        ) from None
    if done.returncode:
        raise ABTestError(
            f"{command!r}: ended with exit code {done.returncode} after {time.monotonic() - began:.1f} s: "
            f"{_last_lines(done.stdout)}"
        )


def _last_lines(output: str) -> str:
    """Return the exception that ended a command, or else the last lines of its output."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("backlight: ")]
    errors = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b", line)]
    return " | ".join(errors[-1:] or lines[-LINES_SHOWN:]) or "it printed nothing"


def _medians(command: str, out: Path, wanted: int) -> tuple[dict[str, float], str]:
    """Return the median seconds of the steady steps by phase, and what limits them.

    Of a run without a steady part the second half counts: one of several on a busy machine must not cost the
    others, and what it differs by widens the interval over the pairs.

    Raises
    ------
    ABTestError
        If the run has too few steps.
    """
    try:
        table = read_phases(open_run(out))
    except RunFormatError as error:
        raise ABTestError(f"{command!r}: wrote no run: {error}") from None
    if table is None:
        raise ABTestError(f"{command!r}: took no step of an optimizer after a backward")
    steady, rest = table.steady()
    trouble = steady.trouble
    if not len(rest.steps) and len(table.steps) > 2 * WINDOW_STEPS:
        rest = table.after(len(table.steps) // 2)
        trouble += "; its second half counts"
    if len(rest.steps) < MIN_STEPS:
        ended = len(table.steps) < wanted
        fix = f"the script ended before {wanted} steps: let it train longer" if ended else "raise --steps"
        raise ABTestError(f"{command!r}: {trouble}; {fix}")
    medians = {name: float(np.median(rest.phase(name))) for name in rest.names}
    return {STEP: float(np.median(rest.total)), **medians}, trouble
