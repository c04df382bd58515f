"""All statistics of a step's gradients, against one norm and against what people write.

The shapes are those of GPT-2 small, 148 tensors with 124 million scalars, and a model of a million in
50 tensors. All methods are interleaved in one process, and every figure is a median; ratios are
to one ``torch._foreach_norm`` over the same tensors. Memory is how far the peak of the process rose
above what it held before the call, as the kernel counts it. It also measures exponent histograms, what
``wandb.watch`` does for its histograms, and the cost of the update ratio, which has a pass of its own.

    OMP_WAIT_POLICY=PASSIVE python bench/measure.py --threads 1 4
    OMP_WAIT_POLICY=PASSIVE python bench/measure.py --first [--small] --threads 1
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import statistics as stdlib_statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import backlight
from backlight.measure.stats.compiled_rows import COMPILED_ROWS
from backlight.measure.stats.histogram import histogram
from backlight.measure.stats.kernels import SCRATCH
from backlight.measure.stats.statistics import statistics, why_not_compiled
from backlight.measure.stats.update import PER_TENSOR, WeightSample

Method = Callable[[], object]

FOREACH = "torch._foreach_norm"

PR_SET_CHILD_SUBREAPER = 36


def gpt2_small() -> list[tuple[int, ...]]:
    """Return the shapes of the 148 parameters of GPT-2 small, the head tied to the embedding."""
    width = 768
    norm = [(width,), (width,)]
    attention = [(3 * width, width), (3 * width,), (width, width), (width,)]
    feed_forward = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    block = [*norm, *attention, *norm, *feed_forward]
    return [(50257, width), (1024, width), *(block * 12), *norm]


def million() -> list[tuple[int, ...]]:
    """Return 50 shapes of a transformer with about a million parameters."""
    width = 128
    attention = [(3 * width, width), (3 * width,), (width, width), (width,)]
    block = [(width,), (width,), *attention, (width,), (width,), (4 * width, width), (width, 4 * width)]
    return [(96, width), (128, width), *(block * 5)][:50]


def by_item(gradients: list[Tensor]) -> list[tuple[float, ...]]:
    """Read six numbers of every gradient, one after the other, as loops in training scripts do."""
    return [
        (
            g.norm().item(),
            g.abs().max().item(),
            g.mean().item(),
            (g == 0).sum().item(),
            g.isnan().sum().item(),
            g.isinf().sum().item(),
        )
        for g in gradients
    ]


def like_wandb(gradients: list[Tensor]) -> list[tuple[float, float, Tensor]]:
    """Take a histogram of 64 bins of every gradient between its extremes, and move it to the host."""
    found = []
    for gradient in gradients:
        flat = gradient.reshape(-1)
        if not torch.isfinite(flat).all():
            flat = flat[torch.isfinite(flat)]
        low, high = flat.min().item(), flat.max().item()
        found.append((low, high, flat.histc(bins=64, min=low, max=high).cpu().detach().clone()))
    return found


def updates(parameters: list[Tensor], per_tensor: int | None) -> Method:
    """Return a pass that keeps a sample of the weights and compares it, as around a step."""
    sample = WeightSample(parameters, per_tensor=per_tensor)

    def run() -> object:
        sample.before()
        return sample.after()

    return run


def peak(method: Method) -> float | None:
    """Return by how many MB the resident memory rose while ``method`` ran; None where nothing counts it.

    What earlier calls left in torch's or in our own buffers is given back first.
    """
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    SCRATCH.drop()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        clear.write_text("5")
        before = _status(status, "VmRSS")
        kept = method()
        top = _status(status, "VmHWM")
        del kept
    except (OSError, KeyError, AttributeError):
        return None
    return max(0.0, (top - before) / 1024)


def _status(path: Path, field: str) -> int:
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return int(lines[field].split()[0])


def timed(methods: dict[str, Method], repeats: int, settle: Method = lambda: None) -> dict[str, float]:
    """Return the median milliseconds of each method, until ``settle`` returns; interleaved."""
    took: dict[str, list[float]] = {name: [] for name in methods}
    for method in methods.values():
        method()
    settle()
    for _ in range(repeats):
        for name, method in methods.items():
            begin = time.perf_counter()
            method()
            settle()
            took[name].append(time.perf_counter() - begin)
    return {name: 1e3 * stdlib_statistics.median(values) for name, values in took.items()}


@functools.cache
def compile_seconds() -> float:
    """Compile the pass once more in a process of its own; return the processor seconds of the compiler."""
    script = "from backlight.measure.stats.compiled_rows import COMPILED_ROWS; COMPILED_ROWS.{}()"
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    seconds = {}
    for call in ("is_ready", "wait"):  # the former to take off what starting the interpreter takes
        before = os.times()
        subprocess.run([sys.executable, "-c", script.format(call)], check=True)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        after = os.times()
        used = after.children_user + after.children_system
        seconds[call] = used - before.children_user - before.children_system
    return seconds["wait"] - seconds["is_ready"]


def table_for(
    title: str, shapes: list[tuple[int, ...]], repeats: int, rare: int, dtype: torch.dtype, device: str
) -> Table:
    """Measure everything for one list of shapes."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape).mul_(1e-3).to(device, dtype) for shape in shapes]
    settle = torch.accelerator.synchronize if device != "cpu" else lambda: None
    samples = {
        f"update ratio, {PER_TENSOR} of a tensor": PER_TENSOR,
        "update ratio, 1024 of a tensor": 1024,
        "update ratio, exact": None,
    }
    often: dict[str, Method] = {
        FOREACH: lambda: torch._foreach_norm(tensors),
        "all statistics, compiled": lambda: statistics(tensors, tier="compiled"),
        "all statistics, compiled, and read": lambda: statistics(tensors, tier="compiled").arrays(),
        "all statistics, eager": lambda: statistics(tensors, tier="eager"),
        **{name: updates(tensors, wanted) for name, wanted in samples.items() if wanted},
        "the loop of .item()": lambda: by_item(tensors),
    }
    seldom: dict[str, Method] = {
        FOREACH: often[FOREACH],
        "update ratio, exact": updates(tensors, None),
        "exponent histograms": lambda: histogram(tensors),
        "histograms as wandb.watch does": lambda: like_wandb(tensors),
    }
    table = Table(title=title)
    table.add_column("method", no_wrap=True)
    for name in ("ms", "x", "extra MB"):
        table.add_column(name, justify="right", no_wrap=True)
    for methods, count in ((often, repeats), (seldom, rare)):
        found = timed(methods, count, settle)
        for name, value in found.items():
            if methods is seldom and name == FOREACH:
                continue
            # A sample keeps its buffers, so that a new one is needed to see what they take.
            extra = peak(updates(tensors, samples[name]) if name in samples else methods[name])
            memory = "?" if extra is None else f"{extra:.1f}"
            table.add_row(name, f"{value:.2f}", f"{value / found[FOREACH]:.2f}", memory)
    reason = why_not_compiled()
    size = f"{len(tensors)} tensors, {sum(t.numel() for t in tensors):,} scalars"
    table.caption = f"{size}; " + (
        f"not compiled: {reason}" if reason else f"compiling took {compile_seconds():.2f} s of a processor"
    )
    return table


def first_calls(small: bool) -> None:
    """Print the seconds of this thread of the first calls of ``collect`` in a process, and of those after."""
    gradients = [torch.randn(shape).mul_(1e-3) for shape in (million() if small else gpt2_small())]
    parameters = [torch.nn.Parameter(torch.empty_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    calls: dict[str, Method] = {
        FOREACH: lambda: torch._foreach_norm(gradients),
        "collect": lambda: backlight.collect(parameters),
        "collect().result()": lambda: backlight.collect(parameters).result(),
    }

    def seconds(name: str, count: int) -> list[float]:
        took = []
        for _ in range(count):
            begin = time.thread_time()
            calls[name]()
            took.append(time.thread_time() - begin)
        return took

    seconds(FOREACH, 3)
    backlight.collect([])  # imports
    first = seconds("collect().result()", 7)
    reference = stdlib_statistics.median(seconds(FOREACH, 7))
    while why_not_compiled() == "" and not COMPILED_ROWS.is_ready():
        time.sleep(0.01)
    rounds = [{name: seconds(name, 1)[0] for name in calls} for _ in range(200 if small else 9)]
    later = {name: stdlib_statistics.median(one[name] for one in rounds) for name in calls}
    ratios = ", ".join(f"{took / reference:.1f}" for took in first)
    print(f"{len(gradients)} tensors, over one {FOREACH} ({1e3 * reference:.2f} ms of this thread):")
    print(f"  first calls of collect().result(): {ratios}; mean {sum(first) / 7 / reference:.2f}")
    print(*(f"  then {name}: {later[name] / later[FOREACH]:.2f}" for name in list(calls)[1:]), sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--repeats", type=int, default=15, help="turns of the fast methods")
    parser.add_argument("--rare", type=int, default=3, help="turns of the slow methods")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="the model of a million only")
    parser.add_argument("--first", action="store_true", help="the first calls of collect, and nothing else")
    options = parser.parse_args()
    if options.first:
        torch.set_num_threads(options.threads[0])
        first_calls(options.small)
        return 0
    console = Console()
    dtype = getattr(torch, options.dtype)
    for threads in options.threads:
        torch.set_num_threads(threads)
        threaded = f"{threads} thread{'s' if threads > 1 else ''}"
        named = f"{options.dtype}, {threaded if options.device == 'cpu' else options.device}"
        sets = [("a million in 50 tensors", million(), 10 * options.repeats, 20)]
        if not options.small:
            sets.insert(0, ("GPT-2 small", gpt2_small(), options.repeats, options.rare))
        for title, shapes, repeats, rare in sets:
            console.print(table_for(f"{title}, {named}", shapes, repeats, rare, dtype, options.device))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
