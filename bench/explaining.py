"""How much slower a training is under the commands that explain, and under tracing.

The demo's model; plain and observed steps alternate in blocks in one process, and the figure is the
median over pairs of blocks of the ratio of their times.

    OMP_WAIT_POLICY=PASSIVE python bench/explaining.py
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from backlight.diagnose.checkpointing.observer import CheckpointObserver
from backlight.diagnose.missing_gradients.observer import MissingGradientObserver
from backlight.diagnose.nan.tracer import NanTracer
from backlight.monitors.stalls.instrument.backward_trace import Tracer
from backlight.monitors.stalls.trace_monitor import KINDS

sys.path.insert(0, str(Path(__file__).parent))
from overhead import Training


def never() -> None:
    """Let the observed training go on."""


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Trace everything, into nothing."""
    tracer = Tracer(KINDS, lambda _text, _payload: None)
    tracer.start()
    try:
        yield
    finally:
        tracer.stop()


OBSERVERS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "why-no-grad": lambda: MissingGradientObserver(10**9, never),
    "nan": lambda: NanTracer(never),
    "checkpointing": lambda: CheckpointObserver(10**9, never),
    "stalls.trace=gradients,modules,buckets": tracing,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of a block")
    options = parser.parse_args()
    training = Training("cpu")
    training.steps(3)
    table = Table("observed by", "times slower", "least", "most", box=None, pad_edge=False)
    for name, make in OBSERVERS.items():
        ratios = []
        for _ in range(options.pairs):
            plain = training.steps(options.steps)
            with make():
                training.steps(1)
                observed = training.steps(options.steps)
            ratios.append(observed / plain)
        table.add_row(name, *(f"{n:.2f}" for n in (statistics.median(ratios), min(ratios), max(ratios))))
    Console().print(table)


if __name__ == "__main__":
    main()
