"""The spectral echo of one layer, against a full decomposition of every replicate.

Per shape, in one process of its own and in CPU time: R full singular value decompositions (the median of
five, times R), and the whole measurement of the echo: checks, noise, directions, references of the others,
alignment, intervals, null. The echo of every identifiable direction is compared with that of full
decompositions of all replicates and all references (of ``--full`` replicates, if fewer), aligned among all
directions. The peak of memory is how far the process rose above what it held, replicates included, next to
what all factors of all replicates take. Last, the Hungarian alignment of 1024 directions.
``--null`` measures instead how often directions are found where there are none: in a language model that was
trained on uniformly random tokens, and in noise with structure.

    OMP_WAIT_POLICY=PASSIVE python bench/spectra.py [--replicates 64] [--full 16] [--quick] [--null]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from backlight.measure.spectra import echo as estimate
from backlight.measure.spectra.echo import align, overlaps
from backlight.measure.spectra.measurement import spectral_echo
from backlight.measure.spectra.shrinkage import threshold

SHAPES = ((1024, 4096), (1024, 1024))
STRENGTHS = (30.0, 20.0, 15.0, 10.0, 8.0, 6.0, 5.0, 4.0, 3.5, 3.0, 2.5, 2.2, 1.9, 1.7, 1.5, 1.3)
"""Strengths of the injected directions, in units of the threshold; half as many again lie below it."""

Row = dict[str, float | str]


def replicates(p: int, q: int, count: int) -> Tensor:
    """Return replicates of a gradient with a decaying spectrum, in noise of variance 1."""
    torch.manual_seed(0)
    below = [0.9 * 0.85**i for i in range(len(STRENGTHS) // 2)]
    s_K = torch.tensor([*STRENGTHS, *below]) * threshold(1.0, p, q)
    U = torch.linalg.qr(torch.randn(p, len(s_K)))[0]
    V = torch.linalg.qr(torch.randn(q, len(s_K)))[0]
    return torch.randn(count, p, q).add_((U * s_K) @ V.T)


def cpu(action: Callable[[], object]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def full_echo(G_Rpq: Tensor, k: int) -> np.ndarray:
    """Return the echo of k directions by full decompositions of everything."""
    R, mean = len(G_Rpq), G_Rpq.mean(0)
    U, _, Vt = torch.linalg.svd(mean, full_matrices=False)
    names, lefts, rights = (U[:, :k], Vt[:k].T), [], []
    for G in G_Rpq:
        U, _, Vt = torch.linalg.svd((R * mean - G) / (R - 1), full_matrices=False)
        score = overlaps(U, Vt.T, *names).prod(0)
        order = torch.from_numpy(align(score).permutation)
        reference = U[:, order], Vt[order].T
        U, _, Vt = torch.linalg.svd(G, full_matrices=False)
        score = overlaps(U, Vt.T, *reference).prod(0)
        order = torch.from_numpy(align(score).permutation)
        lefts.append(U[:, order])
        rights.append(Vt[order].T)
    return estimate.triple_mean(estimate.reverb(torch.stack(lefts), torch.stack(rights)))


def shape(p: int, q: int, count: int, full: int) -> Row:
    torch.set_num_threads(1)
    G = replicates(p, q, count)
    spectral_echo(G[:3, :400, :400])  # what is imported, allocated and warmed up on first use
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    found = spectral_echo(G)
    seconds = time.process_time() - begin
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    svd = statistics.median(
        cpu(lambda a=a: torch.linalg.svd(G[a], full_matrices=False)) for a in range(min(5, count))
    )
    factors = count * (p + q) * min(p, q) * 4
    row: Row = {
        "directions found": str(found.identifiable),
        "method": found.method,
        "R full SVDs, CPU s": f"{svd * count:.1f}",
        "echo, CPU s": f"{seconds:.1f}",
        "times less": f"{svd * count / seconds:.1f}",
        "peak memory, MiB": f"{peak / 2**20:.0f}",
        "share of all factors": f"{peak / factors:.3f}",
    }
    if full:
        part = found if full >= count else spectral_echo(G[:full])
        k = part.identifiable
        error = np.abs(part.echo[:k] - full_echo(G[:full], k)).max()
        row["replicates compared"] = str(full)
        row["largest error of echo"] = f"{error:.6f}"
        row["weakest echo"] = f"{part.echo[:k].min():.3f}"
    return row


def alone(*arguments: int) -> Row:
    """Measure in a process of its own: its peak of memory is then that of the measurement."""
    code = (
        "import sys, json; sys.path[:0] = sys.argv[1:2]; import spectra\n"
        "print(json.dumps(spectra.shape(*map(int, sys.argv[2:]))))"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), *map(str, arguments)]
    row: Row = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return row


def hungarian(size: int = 1024) -> dict[str, float]:
    """Return median wall seconds of alignments: of columns that noise has turned, and of noise alone."""
    generator = np.random.default_rng(0)
    U, V, X, Y = (np.linalg.qr(generator.normal(size=(size, size)))[0] for _ in range(4))
    turned = np.linalg.qr(U + generator.normal(size=(size, size)) / np.sqrt(size))[0]
    cases = {"half turned": (U.T @ turned, U.T @ turned), "noise": (U.T @ X, V.T @ Y)}
    medians = {}
    for name, (left, right) in cases.items():
        score = np.abs(left * right)[:, generator.permutation(size)]
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            align(score)
            times.append(time.perf_counter() - begin)
        medians[name] = statistics.median(times)
    return medians


class LanguageModel(torch.nn.Module):
    """A transformer of one layer, without dropout, of ``tokens`` tokens."""

    def __init__(self, tokens: int = 32, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(tokens, width)
        self.position = torch.nn.Embedding(length, width)
        self.block = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.head = torch.nn.Linear(width, tokens, bias=False)
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of ``x`` ``[N, T]``."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.embed(x) + self.position.weight[: x.shape[1]]
        return self.head(self.block(hidden, src_mask=mask, is_causal=True))


def language(seed: int, *, random: bool, count: int = 8, steps: int = 200) -> dict[str, tuple[int, int]]:
    """Return directions found and candidates by matrix, of replicates of 16 sequences each.

    Tokens are uniformly random, or each follows its predecessor by a fixed random table, with noise.
    """
    torch.manual_seed(seed)
    model = LanguageModel()
    following = torch.randint(0, 32, (32,))

    def loss() -> Tensor:
        x = torch.randint(0, 32, (16, model.length + 1))
        if not random:
            for t in range(model.length):
                x[:, t + 1] = torch.where(torch.rand(16) < 0.8, following[x[:, t]], x[:, t + 1])
        out = model(x[:, :-1])
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), x[:, 1:].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps if random else 20):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    replicas = [torch.autograd.grad(loss(), list(matrices.values())) for _ in range(count)]
    found = {}
    for name, of_layer in zip(matrices, zip(*replicas, strict=True), strict=True):
        echo = spectral_echo(of_layer, layer=name)
        found[name] = (echo.identifiable, echo.candidates)
    return found


def structured(seed: int, kind: str, count: int = 8) -> tuple[int, int]:
    """Return directions found and candidates in noise without signal whose entries are not independent."""
    torch.manual_seed(seed)
    p, q = 64, 128
    if kind == "few samples: rank 4 each":
        G = torch.randn(count, p, 4) @ torch.randn(count, 4, q)
    elif kind == "rows of unequal variance":
        G = torch.randn(count, p, q) * torch.logspace(0, 2, p)[:, None]
    elif kind == "heavy tails (t, 2 degrees)":
        G = torch.distributions.StudentT(2.0).sample((count, p, q))
    elif kind == "one column of noise shared":
        G = torch.randn(count, p, q) + 8 * torch.randn(count, p, 1) * torch.ones(q)
    else:
        G = torch.randn(count, p, q)
    echo = spectral_echo(list(G))
    return echo.identifiable, echo.candidates


STRUCTURES = (
    "independent entries", "few samples: rank 4 each", "rows of unequal variance",
    "heavy tails (t, 2 degrees)", "one column of noise shared",
)  # fmt: skip


def nulls(console: Console, seeds: int = 10) -> None:
    """Print how often directions are found where there are none, and where there are some."""
    table = Table("replicates of", "matrices", "above the noise edge", "found", box=None)
    for name, random in (("a model on random tokens", True), ("a model on tokens with a rule", False)):
        rows = [row for seed in range(seeds) for row in language(seed, random=random).values()]
        table.add_row(name, str(len(rows)), *(str(sum(row[k] > 0 for row in rows)) for k in (1, 0)))
    for kind in STRUCTURES:
        rows = [structured(seed, kind) for seed in range(10 * seeds)]
        table.add_row(
            f"noise: {kind}", str(len(rows)), *(str(sum(row[k] > 0 for row in rows)) for k in (1, 0))
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicates", type=int, default=64)
    parser.add_argument("--full", type=int, default=16, help="replicates of the full computation; 0: none")
    parser.add_argument("--quick", action="store_true", help="R = 8, 512 x 2048 and 512 x 512")
    parser.add_argument("--null", action="store_true", help="directions found where there are none")
    options = parser.parse_args()
    if options.null:
        torch.set_num_threads(1)
        nulls(Console(width=100))
        return 0
    shapes = tuple((p // 2, q // 2) for p, q in SHAPES) if options.quick else SHAPES
    count = 8 if options.quick else options.replicates
    console = Console()
    table = Table("", title=f"Spectral echo, R = {count}, one thread, torch {torch.__version__}")
    for p, q in shapes:
        table.add_column(f"{p} x {q}", justify="right")
    rows = [alone(p, q, count, min(options.full, count)) for p, q in shapes]
    for name in rows[0]:
        table.add_row(name, *(str(row[name]) for row in rows))
    console.print(table)
    for name, seconds in hungarian().items():
        console.print(f"Hungarian alignment of 1024 directions, {name}: {seconds:.3f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
