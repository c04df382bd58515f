"""What watching adds to a step on 1, 2 and 4 ranks, and what whole tensors would cost instead.

Watched and unwatched steps alternate in one run, on all ranks; the figures are medians over pairs
of neighbouring steps of the ratio of their times on rank 0. Then the statistics of all local shards are
compared with those of ``full_tensor()`` of each gradient, in the same process.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python bench/ranks.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH = 256, 8, 16


def build() -> nn.Module:
    """Return a transformer of 8 layers, 148 parameters, 6.4 M weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, bias=True)
    return nn.Sequential(nn.Linear(32, WIDTH), nn.TransformerEncoder(layer, LAYERS), nn.Linear(WIDTH, 32))


def wrapped(method: str) -> Any:
    """Return the model under DDP or FSDP2."""
    model = build()
    if method == "DDP":
        return DistributedDataParallel(model)
    for layer in model[1].layers:  # type: ignore[union-attr]  # of an encoder
        fully_shard(layer)
    return fully_shard(model)


def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """Train one step; return its seconds."""
    begin = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    return time.perf_counter() - begin


def overhead(method: str, pairs: int) -> list[float]:
    """Return watched over unwatched seconds of pairs of steps."""
    import backlight
    from backlight.capture.hub import HUB

    model = wrapped(method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(BATCH, 64, 32)
    ratios = []
    folder = Path(os.environ["BENCH_FOLDER"]) / method
    with backlight.watch(model, optimizer, run=folder, every=1):
        listeners = HUB.listeners
        for number in range(pairs + 4):
            seconds = {}
            for watched in (True, False) if number % 2 else (False, True):
                for listener in listeners:
                    (HUB.add if watched else HUB.remove)(listener)
                dist.barrier()
                seconds[watched] = step(model, optimizer, x)
            if number >= 4:
                ratios.append(seconds[True] / seconds[False])
        for listener in listeners:
            HUB.add(listener)
    return ratios


def whole_tensors(repeats: int) -> tuple[float, float]:
    """Return seconds for the statistics of all shards, and of each ``full_tensor()``, medians."""
    from backlight.capture.parameters import local
    from backlight.measure.stats.statistics import statistics as measured

    model = wrapped("FSDP2")
    model(torch.randn(BATCH, 64, 32)).square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]

    def with_backlight() -> None:
        measured([local(g) for g in grads]).arrays()

    def gathered() -> None:
        measured([g.full_tensor() for g in grads]).arrays()  # type: ignore[attr-defined]  # of a DTensor

    return _median(with_backlight, repeats), _median(gathered, repeats)


def _median(work: Callable[[], None], repeats: int) -> float:
    times = []
    for number in range(repeats + 2):
        dist.barrier()
        begin = time.perf_counter()
        work()
        if number >= 2:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def worker(pairs: int) -> None:
    """Measure on one rank; rank 0 writes what it saw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {method: overhead(method, pairs) for method in ("DDP", "FSDP2")}
    shards, whole = whole_tensors(max(5, pairs // 4))
    if dist.get_rank() == 0:
        path = Path(os.environ["BENCH_FOLDER"]) / "result.json"
        path.write_text(json.dumps({"overhead": result, "shards": shards, "whole": whole}))
    dist.barrier()
    dist.destroy_process_group()


def launched(ranks: int, pairs: int) -> dict[str, Any]:
    """Run the workers, and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        environment = {**os.environ, "BENCH_FOLDER": folder, "PET_LOG_DIR": folder, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, __file__, "--pairs", str(pairs)],
            env=environment,
            check=True,
            stderr=subprocess.DEVNULL,
            timeout=900,
        )
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    if "RANK" in os.environ:
        worker(options.pairs)
        return
    title = f"{LAYERS} layers of width {WIDTH}, gloo, {os.cpu_count()} cores, {options.pairs} pairs"
    added = Table(title=f"added to a step, every step recorded: {title}")
    whole = Table(title="statistics of all shards against those of full_tensor() of each")
    for name in ("ranks", "method", "median", "quartiles"):
        added.add_column(name, justify="right")
    for name in ("ranks", "shards", "full_tensor()", "ratio"):
        whole.add_column(name, justify="right")
    for ranks in options.ranks:
        found = launched(ranks, options.pairs)
        for method, ratios in found["overhead"].items():
            low, middle, high = ((value - 1) * 100 for value in statistics.quantiles(ratios, n=4))
            added.add_row(str(ranks), method, f"{middle:+.1f} %", f"{low:+.1f} … {high:+.1f} %")
        here, there = found["shards"], found["whole"]
        whole.add_row(str(ranks), f"{here * 1e3:.2f} ms", f"{there * 1e3:.1f} ms", f"{there / here:.0f} x")
    Console().print(added)
    Console().print(whole)


if __name__ == "__main__":
    main()
