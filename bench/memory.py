"""Predicted against measured memory, and what a prediction takes.

Each case of the matrix (models x precisions x checkpointing with AdamW; models x optimizers) runs two real
steps under torch.profiler, which counts in the CPU's allocator, and two on fake tensors; compared is the
peak of the second, without the workspaces that kernels allocate and free. Cases off by more than 1 % are
listed. Then the time of a prediction of GPTs of several depths, in a process that has started already,
against torch's own MemTracker over two fake steps of the same. Then the processor seconds of whole processes,
interleaved: ``backlight memory predict`` against a process that does nothing but MemTracker's two steps.

    OMP_NUM_THREADS=1 python bench/memory.py [--quick] [--speed] [--processes]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "diagnose" / "memory"))

import matrix_recipe as matrix  # noqa: E402 - found next to the tests
from measured import measured_peak  # noqa: E402

from backlight.diagnose.memory.predictor import Predictor  # noqa: E402
from backlight.launch.recipe import read_recipe  # noqa: E402

RECIPE = ROOT / "tests" / "diagnose" / "memory" / "matrix_recipe.py"
GPT = ROOT / "examples" / "gpt_recipe.py"


def cases(*, quick: bool) -> Iterator[dict[str, str]]:
    names = ("model", "precision", "optimizer", "checkpointing")
    found = set()
    for model in matrix.MODELS:
        found |= set(itertools.product([model], matrix.PRECISIONS, ["adamw"], matrix.CHECKPOINTING))
        found |= set(itertools.product([model], ["fp32"], matrix.OPTIMIZERS, ["none"]))
    for case in sorted(found)[:: 5 if quick else 1]:
        yield dict(zip(names, case, strict=True))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back what the profiler writes to standard error by itself."""
    kept, away = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(away, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(away)


def agreement(predictor: Predictor, console: Console, *, quick: bool) -> None:
    table = Table("model", "precision", "optimizer", "checkpointing", "measured MB", "predicted")
    within = exact = total = 0
    for case in cases(quick=quick):
        with quiet():
            measured = measured_peak(RECIPE, dict(case)).tensors
        predicted = predictor.predict(read_recipe(RECIPE, case), device="cpu").peak
        total += 1
        exact += predicted == measured
        within += abs(predicted / measured - 1) <= 0.01
        if abs(predicted / measured - 1) > 0.01:
            table.add_row(*case.values(), f"{measured / 1e6:.2f}", f"{predicted / measured - 1:+.2%}")
    console.print(f"{total} cases: {within} within 1 %, {exact} of them to the byte; the others:")
    console.print(table)


def tracked(recipe_settings: dict[str, int]) -> float:
    """Return the seconds that torch's MemTracker takes for two fake steps."""
    from mem_tracker import track

    recipe = read_recipe(GPT, recipe_settings)
    begin = time.perf_counter()
    track(recipe.module, recipe_settings)
    return time.perf_counter() - begin


def processor_seconds(command: list[str]) -> float:
    """Return the processor seconds of a command and of what it starts."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return used() - before


def whole_processes(console: Console, *, quick: bool) -> None:
    table = Table("layers", "backlight memory predict s", "MemTracker s", "ratio")
    here = Path(sys.executable).parent / "backlight"
    for layers in (1, 2, 4) if quick else (1, 2, 4, 8, 12, 24):
        settings = [f"n_blocks={layers}", "batch=8", "seq=64"]
        predicting = [str(here), "memory", "predict", str(GPT)]
        predicting += [part for setting in settings for part in ("--set", setting)]
        tracking = [sys.executable, str(Path(__file__).parent / "mem_tracker.py"), *settings]
        pairs = [
            (processor_seconds(predicting), processor_seconds(tracking)) for _ in range(3 if quick else 5)
        ]
        own, other = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        table.add_row(str(layers), f"{own:.2f}", f"{other:.2f}", f"{ratio:.2f}")
    console.print(table)


def speed(predictor: Predictor, console: Console, *, quick: bool) -> None:
    table = Table("layers", "parameters M", "predicted in s", "MemTracker s", "ratio")
    predictor.predict(read_recipe(GPT, {}))  # starts the process
    for layers in (6, 12) if quick else (6, 12, 24, 48):
        settings = {
            "n_blocks": layers,
            "dim": 1280,
            "heads": 20,
            "batch": 8,
            "seq": 1024,
            "vocabulary": 50257,
        }
        recipe = read_recipe(GPT, settings)
        begin = time.perf_counter()
        prediction = predictor.predict(recipe)
        seconds = time.perf_counter() - begin
        theirs = tracked(settings)
        table.add_row(
            str(layers),
            f"{prediction.parameters / 1e6:.0f}",
            f"{seconds:.1f}",
            f"{theirs:.1f}",
            f"{theirs / seconds:.1f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", action="store_true", help="leave the matrix out")
    parser.add_argument("--quick", action="store_true", help="a fifth of the matrix, 12 layers at most")
    parser.add_argument("--processes", action="store_true", help="whole processes alone")
    asked = parser.parse_args()
    quick = asked.quick
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    console = Console()
    if asked.processes:
        whole_processes(console, quick=quick)
        return
    with Predictor() as predictor:
        if not asked.speed:
            agreement(predictor, console, quick=quick)
        speed(predictor, console, quick=quick)
    whole_processes(console, quick=quick)


if __name__ == "__main__":
    main()
