"""Signals at random moments of a training run leave the files, the output and the end of plain Python."""

from __future__ import annotations

import itertools
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import backlight
from exits import interrupted
from exits.programs import CONSOLE_SCRIPT, OWN_LINES

PLAIN = [sys.executable]
WATCHED = [CONSOLE_SCRIPT, "run", "--out", "run"]
ROUNDS = 5
MAX_STEPS = 40
"""Steps of a round after which a signal is sent, at most."""

MAX_COUNT = 60_000
"""To which is counted between the line of a step and the signal: about two milliseconds."""

MAX_LINES = 3000
"""That a script prints after a signal: a pipe holds fewer. One that prints more has lost it."""

ENDS = {signal.SIGINT: ("KeyboardInterrupt", -signal.SIGINT), signal.SIGTERM: ("StopError", 1)}


def start(command: list[str | Path], rounds: int, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, interrupted.__file__, str(rounds)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def interrupt_round(process: subprocess.Popen[str], number: signal.Signals, draw: random.Random) -> list[str]:
    """Send a signal at a random moment of a round; return the lines that the round prints."""
    assert process.stdout is not None
    steps, count = draw.randint(1, MAX_STEPS), draw.randrange(MAX_COUNT)
    lines = list(itertools.islice(process.stdout, steps))
    for _ in range(count):
        pass
    process.send_signal(number)
    for line in itertools.islice(process.stdout, MAX_LINES):
        if line.startswith("caught"):
            assert line == f"caught {ENDS[number][0]}\n"
            return lines
        lines.append(line)
    assert len(lines) < steps + MAX_LINES, "the signal was lost"
    return lines


def check_round(number: int, printed: list[str], folder: Path) -> int:
    """Compare what a round left with a round of plain Python; return its last step."""
    checkpoint = torch.load(folder / f"checkpoint-{number}.pt")
    step = checkpoint["step"]
    assert {name: value.shape for name, value in checkpoint["model"].items()} == SHAPES
    lines = (folder / f"losses-{number}.txt").read_text().splitlines(keepends=True)
    assert step - 1 <= len(lines) <= step
    assert len(lines) - 1 <= len(printed) <= len(lines)
    expected = list(itertools.islice(interrupted.lines(interrupted.build()), step))
    assert lines == expected[: len(lines)]
    assert printed == expected[: len(printed)]
    assert (folder / f"saved-{number}.txt").read_text() == f"{step} complete\n"
    return int(step)


SHAPES = {name: value.shape for name, value in interrupted.build().state_dict().items()}


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 40))]
)
@pytest.mark.parametrize("command", [WATCHED, pytest.param(PLAIN, marks=pytest.mark.full)])
def test_signals_at_random_moments(command: list[str | Path], seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    with start(command, ROUNDS, tmp_path) as process:
        try:
            numbers = draw.choices(list(ENDS), (3, 1), k=ROUNDS)
            printed = [interrupt_round(process, number, draw) for number in numbers]
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert output == ""
    steps = [check_round(number, lines, tmp_path) for number, lines in enumerate(printed)]
    assert (tmp_path / "log.txt").read_text() == f"at exit {steps[-1]}\n"
    name, code = ENDS[numbers[-1]]
    assert process.returncode == code
    errors = OWN_LINES.sub("", errors)
    # A signal that arrives at the first line of a function prints an empty line of source.
    expected = rf"Traceback \(most recent call last\):\n((  .*)?\n)+(__main__\.)?{name}\n"
    assert re.fullmatch(expected, errors), errors
    if command is WATCHED:
        run = backlight.open_run(tmp_path / "run")
        assert run.status.value == "failed"
        assert sum(steps) <= run.last_step() + 1 <= sum(steps) + ROUNDS
