"""The spectral echo of one layer, against a full decomposition of every replicate.

Per shape, in one run and in CPU time: R full singular value decompositions (timed on some replicates and
multiplied where ``--full`` is smaller than R), and the whole measurement of the echo (noise, directions,
references of the others, alignment, intervals, null). The echo of every identifiable direction is compared
with that of the full computation on the replicates that both have, and the peak of memory with what all
factors together take. Then the Hungarian alignment of 1024 directions.

    python bench/spectra.py [--replicates 64] [--full 64] [--quick]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from backlight.measure.alignment import align
from backlight.measure.shrinkage import threshold
from backlight.measure.spectra import spectral_echo

SHAPES = ((1024, 4096), (1024, 1024))
STRENGTHS = (30.0, 20.0, 15.0, 10.0, 8.0, 6.0, 5.0, 4.0, 3.5, 3.0, 2.5, 2.2, 1.9, 1.7, 1.5, 1.3)
"""Strengths of the planted directions, in units of the threshold; half of that again lies below it."""


def replicates(p: int, q: int, count: int) -> torch.Tensor:
    """Return replicates of a gradient with a decaying spectrum, in noise of variance 1."""
    torch.manual_seed(0)
    below = [0.9 * 0.85**i for i in range(len(STRENGTHS) // 2)]
    s_K = torch.tensor([*STRENGTHS, *below]) * threshold(1.0, p, q)
    U = torch.linalg.qr(torch.randn(p, len(s_K)))[0]
    V = torch.linalg.qr(torch.randn(q, len(s_K)))[0]
    G_Rpq = torch.randn(count, p, q)
    return G_Rpq.add_((U * s_K) @ V.T)


def cpu(action: object) -> tuple[float, object]:
    begin = time.process_time()
    value = action()  # type: ignore[operator]  # any callable
    return time.process_time() - begin, value


def shape(p: int, q: int, count: int, full: int, method: str) -> dict[str, float | str]:
    G = replicates(p, q, count)
    torch.linalg.svd(G[0, :64, :64])
    svd = statistics.median(
        cpu(lambda a=a: torch.linalg.svd(G[a], full_matrices=False))[0] for a in range(min(5, count))
    )
    spectral_echo(G[:3, :64, :64])  # what is imported and warmed up on first use
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, found = cpu(lambda: spectral_echo(G, method=method))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    factors = count * (p + q) * min(p, q) * 4
    k = found.identifiable
    row = {
        "layer": f"{p} x {q}",
        "R": count,
        "k": k,
        "way": found.method,
        "svd": svd * count,
        "echo": seconds,
        "faster": svd * count / seconds,
        "memory": peak / factors,
        "peak": peak / 2**20,
    }
    if full:
        part = found if full >= count else spectral_echo(G[:full], method=method)
        k = part.identifiable
        whole = spectral_echo(G[:full], method="svd", null_draws=0)
        row["error"] = float(np.abs(part.echo[:k] - whole.echo[:k]).max())
        row["weakest"] = float(part.echo[:k].min())
        row["compared"] = full
    return row


def alone(*arguments: object) -> dict[str, float | str]:
    """Measure in a process of its own: the peak of memory is then that of the measurement."""
    code = "import sys, json; sys.path[:0] = sys.argv[1:2]; import spectra; " \
        "print(json.dumps(spectra.shape(*map(int, sys.argv[2:6]), sys.argv[6])))"  # fmt: skip
    import json
    from pathlib import Path

    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), *map(str, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def hungarian(size: int = 1024) -> float:
    """Return the median wall seconds of one alignment of columns that noise has turned."""
    generator = np.random.default_rng(0)
    times = []
    for _ in range(5):
        U = np.linalg.qr(generator.normal(size=(size, size)))[0]
        scores = np.abs(U.T @ np.linalg.qr(U + generator.normal(size=(size, size)) / 32)[0])
        begin = time.perf_counter()
        align(scores * scores[::-1, ::-1])
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicates", type=int, default=64)
    parser.add_argument("--full", type=int, default=8, help="replicates of the full computation; 0: none")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--quick", action="store_true", help="R = 8, 512 x 2048 and 512 x 512")
    options = parser.parse_args()
    shapes = tuple((p // 2, q // 2) for p, q in SHAPES) if options.quick else SHAPES
    count = 8 if options.quick else options.replicates
    console = Console()
    table = Table(title=f"Spectral echo, one thread: {torch.__version__}, R = {count}")
    for name in ("layer", "k", "way", "R full SVDs, CPU s", "echo, CPU s", "times less",
                 "peak memory / all factors", "peak MiB", "largest error of echo", "weakest echo"):  # fmt: skip
        table.add_column(name)
    for p, q in shapes:
        row = alone(p, q, count, min(options.full, count), options.method)
        error = f"{row['error']:.5f} (R = {row['compared']})" if "error" in row else "-"
        table.add_row(
            str(row["layer"]), str(row["k"]), str(row["way"]), f"{row['svd']:.1f}", f"{row['echo']:.1f}",
            f"{row['faster']:.1f}", f"{row['memory']:.3f}", f"{row['peak']:.0f}", error,
            f"{row['weakest']:.3f}" if "weakest" in row else "-",
        )  # fmt: skip
    console.print(table)
    console.print(f"Hungarian alignment of 1024 directions: {hungarian():.3f} s")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
