"""What watching adds to a training step of the demo model.

Watched and unwatched steps alternate in one process, so that a machine whose speed drifts slows both
equally; the figures are medians over pairs of neighbouring steps of the ratio of their times, with the 95 %
interval of the median. ``--calls`` times calls outside of steps that the watch wraps instead.

    OMP_WAIT_POLICY=PASSIVE python bench/overhead.py
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import backlight

EXAMPLE = Path(__file__).parents[1] / "examples" / "char_gpt.py"


def load_example() -> ModuleType:
    """Import the demo's script."""
    spec = importlib.util.spec_from_file_location("char_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["char_gpt"] = module
    spec.loader.exec_module(module)
    return module


class Training:
    """The demo's model and step, without its data loader."""

    def __init__(self, device: str) -> None:
        example = load_example()
        torch.manual_seed(0)
        self.model = example.CharGPT(96, 128, 128, 4, 5).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.999**step)
        self.inputs = torch.randint(0, 96, (16, 128), device=device)
        self.targets = torch.randint(0, 96, (16, 128), device=device)
        self.device = device

    def step(self) -> tuple[float, float]:
        """Train one step; return its wall seconds and the processor seconds of all our threads."""
        wall, processor = time.perf_counter(), time.process_time()
        loss = F.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        if self.device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - wall, time.process_time() - processor


def compare(training: Training, pairs: int, settings: dict[str, object] | None) -> list[tuple[float, float]]:
    """Return watched over unwatched seconds, wall and processor, of ``pairs`` pairs of steps.

    One watch is kept open over all pairs and attached for every other step only, so that its start
    and its end are outside: they are no part of a step. What its thread still writes in the unwatched
    step of a pair is not counted, so that the processor's figure is the stricter one
    where a flush falls into the watched step.
    """
    from backlight.capture.hub import HUB

    if settings is None:
        return [_ratio(training.step(), training.step()) for _ in range(pairs)]
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        watch = backlight.watch(training.model, training.optimizer, run=Path(folder) / "run", **settings)
        with watch:
            watch._attached.sampling.grace = (
                0.0  # a bench is short: with the grace the budget would never bind
            )
            listeners = HUB.listeners
            for number in range(pairs + 4):
                seconds = {}
                for watched in (True, False) if number % 2 else (False, True):
                    for listener in listeners:
                        (HUB.add if watched else HUB.remove)(listener)
                    seconds[watched] = training.step()
                if number >= 4:
                    ratios.append(_ratio(seconds[True], seconds[False]))
            for listener in listeners:
                HUB.add(listener)
    return ratios


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, from the order of the values."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low, high = round(len(values) / 2 - half), round(len(values) / 2 + half)
    return ordered[max(low, 0)], ordered[min(high, len(values) - 1)]


def compare_calls(pairs: int) -> dict[str, list[float]]:
    """Return the processor seconds that the watch adds to a call, of ``pairs`` pairs of ten calls each."""
    model = torch.nn.Linear(64, 64)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    calls: dict[str, Callable[[], object]] = {
        "torch.manual_seed(0)": lambda: torch.manual_seed(0),
        "nn.Linear(64, 64)": lambda: torch.nn.Linear(64, 64),
        "SGD(parameters)": optimizer,
        "SGD(parameters), LambdaLR(optimizer)": lambda: torch.optim.lr_scheduler.LambdaLR(
            optimizer(), lambda step: 1.0
        ),
        "clip_grad_norm_(parameters, 1)": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
        "model.eval(), model.train()": lambda: (model.eval(), model.train()),
    }
    seconds: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in calls}
    for _ in range(pairs // 10):
        for is_watched in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "run"
                with contextlib.ExitStack() as watches:
                    if is_watched:
                        watch = backlight.watch(model, run=path, monitors="correctness", quiet=True)
                        watches.enter_context(watch)
                    for name, call in calls.items():
                        for _ in range(10):
                            begin = time.thread_time()
                            for _ in range(10):
                                call()
                            seconds[name][is_watched].append((time.thread_time() - begin) / 10)
    return {
        name: [with_it - without for with_it, without in zip(both[True], both[False], strict=True)]
        for name, both in seconds.items()
    }


def print_calls(pairs: int) -> None:
    """Print what the watch adds to each call."""
    table = Table(title=f"processor time added to a call by the monitor correctness, {pairs} pairs")
    for column in ("call", "median, us", "95 %"):
        table.add_column(column)
    for name, values in compare_calls(pairs).items():
        low, high = interval(values)
        middle = statistics.median(values)
        table.add_row(name, f"{middle * 1e6:+.1f}", f"{low * 1e6:+.1f} … {high * 1e6:+.1f}")
    Console().print(table)


def _ratio(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] / other[0], one[1] / other[1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="text that the names of rows hold, next to the first")
    parser.add_argument("--calls", action="store_true", help="time single calls that the watch wraps")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.calls:
        print_calls(options.pairs)
        return
    training = Training(options.device)
    step = statistics.median(training.step()[0] for _ in range(12))
    where = options.device if options.device != "cpu" else f"CPU, {options.threads} threads"
    table = Table(
        title=f"added to a step of the demo model ({step * 1e3:.0f} ms, {where}), {options.pairs} pairs"
    )
    table.add_column("what is watched")
    for column in ("wall, median", "95 %", "quartiles", "processor, median", "95 %", "quartiles"):
        table.add_column(column, justify="right")
    rows: dict[str, dict[str, object] | None] = {
        "nothing (two unwatched steps)": None,
        "default monitors, sampling by the budget": {},
        "default monitors, every step": {"every": 1},
        "without stalls, every step": {"every": 1, "monitors": "health,steptime"},
        "correctness alone": {"monitors": "correctness"},
        "activations, every step measured": {"monitors": "activations", "activations": {"every": 1}},
        "every step, with histograms": {"every": 1, "health": {"histogram": True}},
    }
    for name, settings in rows.items():
        if settings is not None and options.only not in name:
            continue
        ratios = compare(training, options.pairs, settings)
        cells = []
        for values in zip(*ratios, strict=True):
            low, middle, high = ((value - 1) * 100 for value in statistics.quantiles(values, n=4))
            least, most = ((value - 1) * 100 for value in interval(values))
            cells += [f"{middle:+.2f} %", f"{least:+.2f} … {most:+.2f} %", f"{low:+.1f} … {high:+.1f} %"]
        table.add_row(name, *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
