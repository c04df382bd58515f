"""Alarms of a script at random moments: how many reach its loop, and what they leave behind.

The handler of the alarm raises. In each trial the loop waits for that exception for :data:`PATIENCE_S`; an
alarm that does not come by then is lost. A ``watch`` around all trials (every step recorded, and the default)
and one around each trial are compared with no watch at all.

    OMP_NUM_THREADS=1 python bench/alarms.py
    OMP_NUM_THREADS=1 python bench/alarms.py --alarms 4000 --short 160
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import backlight

LATEST_S = 0.02
PATIENCE_S = 0.25


class TimeUpError(Exception):
    """What the handler of the alarm raises."""


def handle(_number: int, _frame: object) -> None:
    raise TimeUpError


class Training:
    """A small model that takes steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.x = torch.randn(32, 16)

    def step(self) -> None:
        """Take one step."""
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def trial(self, moment_s: float) -> str:
        """Return ``reached``, ``lost`` or ``broken`` for an alarm after ``moment_s`` seconds."""
        torch.set_grad_enabled(True)
        signal.setitimer(signal.ITIMER_REAL, moment_s)
        end = time.monotonic() + moment_s + PATIENCE_S
        try:
            while time.monotonic() < end:
                self.step()
        except TimeUpError:
            return "reached"
        except RuntimeError:
            return "broken"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return "lost"


def measured(
    watch: Callable[[Training, int], AbstractContextManager[Any]], alarms: int, trials: int
) -> Counter[str]:
    """Return the outcomes of ``alarms`` in each of ``trials`` watches; ``mode off`` counts gradient modes."""
    moments, found = random.Random(1), Counter[str]()
    for number in range(trials):
        training = Training()
        with watch(training, number):
            for _ in range(alarms):
                found[training.trial(0.001 + LATEST_S * moments.random())] += 1
                found["mode off"] += not torch.is_grad_enabled()
            torch.set_grad_enabled(True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alarms", type=int, default=1000, help="in one long watch")
    parser.add_argument("--short", type=int, default=100, help="watches of one alarm each")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, handle)
    with tempfile.TemporaryDirectory() as folder:

        def watch(every: int | None, kind: str) -> Callable[[Training, int], AbstractContextManager[Any]]:
            def enter(training: Training, number: int) -> AbstractContextManager[Any]:
                run = Path(folder) / f"{kind}-{number}"
                return backlight.watch(training.model, training.optimizer, run=run, every=every, quiet=True)

            return enter

        rows = {
            "no watch": (lambda *_: contextlib.nullcontext(), options.alarms, 1),
            "one watch, every step": (watch(1, "every"), options.alarms, 1),
            "one watch, default": (watch(None, "default"), options.alarms, 1),
            "a watch each, every step": (watch(1, "short"), 1, options.short),
        }
        columns = ("", "alarms", "reached the loop", "lost", "loop broken", "gradient mode left off")
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for name, row in rows.items():
            found = measured(*row)
            counts = (found[key] for key in ("reached", "lost", "broken", "mode off"))
            print(f"| {name} | {row[1] * row[2]} | {' | '.join(map(str, counts))} |", flush=True)


if __name__ == "__main__":
    main()
