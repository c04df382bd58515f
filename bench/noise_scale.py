"""What the noise scale of single microbatches adds to a training run, at its default cadence.

Steps that are measured alternate with steps that are not, in one watched process, with a control of two that
are not; the figures are medians of ratios. What a run pays is the extra time of a measured step times the
share of steps that are measured.

    OMP_WAIT_POLICY=PASSIVE python bench/noise_scale.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from overhead import load_example
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import backlight
from backlight.monitors.spectra.noise_scale_monitor import NoiseScaleMonitor, next_due

Batch = tuple[Tensor, Tensor]


def mlp() -> tuple[nn.Module, Batch]:
    """Return four layers of 512 and a batch of 128."""
    widths = [512, 512, 512, 512]
    layers = [part for a in widths for part in (nn.Linear(a, 512), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(512, 10)), (torch.randn(128, 512), torch.randint(10, (128,)))


def cnn() -> tuple[nn.Module, Batch]:
    """Return four convolutions and a batch of 64 images of 32 by 32."""
    widths = [3, 32, 64, 64]
    layers: list[nn.Module] = []
    for a, b in zip(widths, [*widths[1:], 128], strict=True):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))
    return model, (torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))


def gpt() -> tuple[nn.Module, Batch]:
    """Return the demo's transformer and a batch of 16 sequences of 128 tokens."""
    return load_example().CharGPT(96, 128, 128, 4, 5), (
        torch.randint(96, (16, 128)),
        torch.randint(96, (16, 128)),
    )


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {"mlp": mlp, "cnn": cnn, "gpt": gpt}

Seconds = tuple[float, float]


def rounds(make: Callable[[], tuple[nn.Module, Batch]], count: int) -> list[dict[str, Seconds]]:
    """Return wall and processor seconds of a measured and two other steps, interleaved, ``count`` times."""
    torch.manual_seed(0)
    model, (x, y) = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        watch = backlight.watch(
            model,
            optimizer,
            run=Path(folder) / "run",
            spectra={"noise_scale": 1},
            every=1,
            monitors="health",
            quiet=True,
        )
        with watch:
            monitor = next(m for m in watch._attached.monitors if isinstance(m, NoiseScaleMonitor))
            names = ["measured", "not", "control"]
            for number in range(count + 3):
                order = names[number % 3 :] + names[: number % 3]
                seconds = {}
                for name in order:
                    monitor._allowed = name == "measured"
                    step(model, optimizer, x, y)  # opens the next one, which is the one that is timed
                    monitor._allowed = False
                    wall, processor = time.perf_counter(), time.process_time()
                    step(model, optimizer, x, y)
                    seconds[name] = time.perf_counter() - wall, time.process_time() - processor
                found += [seconds] if number >= 3 else []
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Train one step."""
    optimizer.zero_grad()
    output = model(x)
    F.cross_entropy(output.flatten(0, -2), y.flatten()).backward()
    optimizer.step()


def measured_steps(steps: int) -> int:
    """Return how many of the first ``steps`` are measured at the default cadence."""
    count, at = 0, 0
    while at < steps:
        count, at = count + 1, next_due(at, 0)
    return count


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table(title=f"noise scale of a microbatch, {options.rounds} rounds, {options.threads} threads")
    table.add_column("model")
    for column in ("a measured step", "quartiles", "control", "processor", "of 1,000 steps", "of 10,000"):
        table.add_column(column, justify="right")
    for name in options.models:
        found = rounds(MODELS[name], options.rounds)
        ratios = [one["measured"][0] / one["not"][0] for one in found]
        low, middle, high = statistics.quantiles(ratios, n=4)
        control = statistics.median(one["control"][0] / one["not"][0] for one in found)
        processor = statistics.median(one["measured"][1] / one["not"][1] for one in found)
        added = [100 * (middle - 1) * measured_steps(steps) / steps for steps in (1000, 10_000)]
        table.add_row(
            name,
            f"{middle:.2f} x",
            f"{low:.2f} … {high:.2f}",
            f"{control:.3f} x",
            f"{processor:.2f} x",
            *(f"{one:+.2f} %" for one in added),
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
