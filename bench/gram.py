"""Top-10 eigenvalues of the second moment of per-sample gradients, against what users would pick.

Models are an MLP 784-256-256-10 with 128 and 512 samples, a GPT of four layers with 8 to 256 positions, and
a small CNN. Every method computes the 10 largest eigenvalues of A^T A / N, A holding the gradients of N
samples: `torch.func.vmap`, BackPACK, ViViT's Gram of BackPACK's gradients, Opacus, and Lanczos with
curvlinops' empirical Fisher (extra `peers`). All methods are interleaved in one process on one thread, in
random order, and every figure is the median of their processor time, which a busy machine stretches least;
ratios are to backlight, so that 20 means twenty times slower. Memory is how far the peak of the process rose
above what it held before the call; the last row of a model is a plain forward and backward pass, which every
method that takes all samples at once needs at least, and the column after `of vmap` is what a method takes
above that row over what `vmap` takes above it. Models are float32; the eigenvalues of backlight are compared
with those of `vmap` in float64. Peers form and multiply gradients in float32. So does backlight where it
forms them, in runs of 64 whose sums go on in float64, and where only float32 makes it faster not to form
them; it multiplies everything in float64 in the row named so; `4 at once` are samples in a pass. `backlight`
is a measurement between checks, which come at measurements 1, 2, 4, 8, ... of a model; `backlight, checked`
is one with all of them. Below stand the bytes of one snapshot.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python bench/gram.py [--convolutions]
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import importlib
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import backlight
from backlight.measure.gram.factors import MatrixFactors
from backlight.measure.gram.layers import convolution, per_sample_weight
from backlight.monitors.grokking.instrument.gram.checks import CheckSchedule

TOP = 10
Batch = tuple[Tensor, Tensor]
Method = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Setting:
    """A model with its batch."""

    name: str
    model: nn.Module
    batch: Batch
    long: bool = False


class Block(nn.Module):
    """Attention and a feed-forward network, layer norm first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        """Return what follows ``h [N, T, width]``."""
        n, t, width = h.shape
        q, k, v = self.qkv(self.first(h)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # Written out: not every peer knows the fused attention.
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        mask = torch.ones(t, t, dtype=torch.bool, device=h.device).tril()
        mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        h = h + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return h + self.down(F.gelu(self.up(self.second(h))))


class GPT(nn.Module):
    """Four layers of width 128; positions are looked up for every sample, as Opacus asks for."""

    def __init__(self, positions: int, vocabulary: int = 128, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [N, vocabulary, T]."""
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        h = self.token(ids) + self.position(places)
        return self.head(self.norm(self.blocks(h))).transpose(1, 2)


def mlp(n: int) -> Setting:
    net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return Setting(f"MLP, N = {n}", net, (torch.randn(n, 784), torch.randint(0, 10, (n,))))


def cnn(n: int) -> Setting:
    net = nn.Sequential(
        nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    return Setting(f"CNN, N = {n}", net, (torch.randn(n, 1, 28, 28), torch.randint(0, 10, (n,))))


def gpt(positions: int, n: int) -> Setting:
    ids = torch.randint(0, 128, (n, positions + 1))
    return Setting(
        f"GPT, T = {positions}, N = {n}", GPT(positions), (ids[:, :-1], ids[:, 1:]), positions > 64
    )


def summed(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def leading(gradients: list[Tensor]) -> Tensor:
    """Return the largest eigenvalues from per-sample gradients [N, ...], as a user would write it."""
    n = gradients[0].shape[0]
    K = sum(g.flatten(1) @ g.flatten(1).T for g in gradients)
    return torch.linalg.eigvalsh(K / n).flip(0)[:TOP]


def backlight_eigenvalues(
    model: nn.Module, batch: Batch, products: torch.dtype | None = None, at_once: int | None = None
) -> Tensor:
    with mock.patch.object(CheckSchedule, "due", lambda self: not self.history.checked):
        found = backlight.gram(model, summed, batch, detail="model", products=products, at_once=at_once)
    return torch.from_numpy(found.spectrum(top=TOP).eigenvalues)


def checked_eigenvalues(model: nn.Module, batch: Batch) -> Tensor:
    def loss(model: nn.Module, batch: Batch) -> Tensor:  # new, so that its first measurement is checked
        return summed(model, batch)

    found = backlight.gram(model, loss, batch, detail="model")
    return torch.from_numpy(found.spectrum(top=TOP).eigenvalues)


def with_vmap(model: nn.Module, batch: Batch) -> Tensor:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(model, values, (x[None],))
        return F.cross_entropy(out, y[None], reduction="sum")

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, *batch)
    return leading(list(found.values()))


def peers(setting: Setting) -> dict[str, Callable[[], Tensor]]:
    """Return the methods of the peers that are installed and know every layer of the model."""
    methods: dict[str, Callable[[], Tensor]] = {}
    makers = {
        "BackPACK": with_backpack,
        "ViViT": with_vivit,
        "Opacus": with_opacus,
        "curvlinops": with_curvlinops,
    }
    for name, make in makers.items():
        try:
            method = make(copy.deepcopy(setting.model), setting.batch)
            method()
        except ImportError as error:
            NOTES.setdefault(f"{name}: not installed ({error})", []).append(setting.name)
        except (NotImplementedError, RuntimeError, AttributeError, KeyError, ValueError, TypeError) as error:
            NOTES.setdefault(f"{name}: {type(error).__name__}: {str(error)[:90]}", []).append(setting.name)
        else:
            methods[name] = method
    return methods


NOTES: dict[str, list[str]] = {}


def with_backpack(model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
    backpack, extensions = importlib.import_module("backpack"), importlib.import_module("backpack.extensions")
    model = backpack.extend(model)
    loss = backpack.extend(nn.CrossEntropyLoss(reduction="sum"))

    def method() -> Tensor:
        with backpack.backpack(extensions.BatchGrad()):
            loss(model(batch[0]), batch[1]).backward()
        found = leading([p.grad_batch for p in model.parameters()])
        for p in model.parameters():
            del p.grad_batch
            p.grad = None
        return found

    return method


def with_vivit(model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
    backpack, extensions = importlib.import_module("backpack"), importlib.import_module("backpack.extensions")
    vivit = importlib.import_module("vivit.extensions.hooks")
    model = backpack.extend(model)
    loss = backpack.extend(nn.CrossEntropyLoss(reduction="sum"))

    def method() -> Tensor:
        hook = vivit.GramBatchGrad(free_grad_batch=True)
        with backpack.backpack(extensions.BatchGrad(), extension_hook=hook):
            loss(model(batch[0]), batch[1]).backward()
        for p in model.parameters():
            p.grad = None
        return torch.linalg.eigvalsh(hook.get_result() / len(batch[0])).flip(0)[:TOP]

    return method


def with_opacus(model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
    opacus = importlib.import_module("opacus.grad_sample")
    wrapped = opacus.GradSampleModule(model, loss_reduction="sum")

    def method() -> Tensor:
        F.cross_entropy(wrapped(batch[0]), batch[1], reduction="sum").backward()
        found = leading([p.grad_sample for p in wrapped.parameters()])
        for p in wrapped.parameters():
            p.grad_sample = p.grad = None
        return found

    return method


def with_curvlinops(model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
    curvlinops = importlib.import_module("curvlinops")
    if batch[1].dim() > 1:
        raise NotImplementedError("its empirical Fisher of sequences is per token")
    from scipy.sparse.linalg import eigsh

    parameters = list(model.parameters())
    loss = nn.CrossEntropyLoss(reduction="sum")

    def method() -> Tensor:
        fisher = curvlinops.EFLinearOperator(model, loss, parameters, [batch], check_deterministic=False)
        values = eigsh(fisher.to_scipy(), k=TOP, return_eigenvectors=False)
        return torch.from_numpy(values.copy()).flip(0) / len(batch[0])

    return method


def plain(setting: Setting) -> Tensor:
    """Run what every method needs at least."""
    parameters = list(setting.model.parameters())
    torch.autograd.grad(summed(setting.model, setting.batch), parameters)
    return torch.zeros(TOP)


def peak(method: Callable[[], Tensor]) -> float:
    """Return by how many MB the resident memory rose while ``method`` ran; nan where nothing counts it."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        clear.write_text("5")
        before = _status(status, "VmRSS")
        method()
        return max(0.0, (_status(status, "VmHWM") - before) / 1024)
    except (OSError, KeyError, AttributeError):
        return float("nan")


def _status(path: Path, field: str) -> int:
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return int(lines[field].split()[0])


def timed(methods: dict[str, Callable[[], Tensor]], repeats: int) -> dict[str, float]:
    """Return the median milliseconds of processor time of each method; interleaved, in a new order each time.

    What ran before leaves caches and a heap that slow the next: a method that always follows the same one
    would pay for it.
    """
    took: dict[str, list[float]] = {name: [] for name in methods}
    for method in methods.values():
        method()
    order, shuffled = list(methods.items()), random.Random(0)
    for _ in range(repeats):
        shuffled.shuffle(order)
        for name, method in order:
            begin = time.process_time()
            method()
            took[name].append(1e3 * (time.process_time() - begin))
    return {name: statistics.median(times) for name, times in took.items()}


def agreement(setting: Setting) -> float:
    """Return the largest relative difference to the eigenvalues by vmap, both in float64."""
    model = copy.deepcopy(setting.model).double()
    batch = tuple(part.double() if part.is_floating_point() else part for part in setting.batch)
    expected = with_vmap(model, batch)
    return float(((backlight_eigenvalues(model, batch) - expected).abs() / expected).max())


def snapshots(settings: list[Setting]) -> Table:
    """Return the bytes of one snapshot: the dense M x M matrix in float32 against what stands for it."""
    table = Table("setting", "M", "dense", "gradient", "Gram", title="bytes of one snapshot")
    for setting in settings:
        m, n = sum(p.numel() for p in setting.model.parameters()), len(setting.batch[0])
        table.add_row(setting.name, f"{m:,}", *(f"{size:,.3g}" for size in (4 * m * m, 4 * m, 8 * n * n)))
    return table


CONVOLUTIONS = (
    (1, 16, 5, 2, 28), (16, 32, 3, 1, 12), (32, 32, 3, 1, 4), (3, 16, 3, 1, 32), (16, 16, 3, 1, 16),
    (16, 32, 3, 1, 8), (32, 64, 3, 1, 8), (64, 64, 3, 1, 4), (64, 64, 3, 1, 2), (32, 64, 1, 1, 8),
    (8, 8, 5, 1, 8), (3, 32, 7, 2, 32), (8, 16, 3, 1, 24),
)  # fmt: skip
"""Inputs, outputs, kernel, stride and side of the image."""


def convolutions(repeats: int) -> Table:
    """Return the time to form gradients of 64 samples from patches and by torch's kernel, and the choice."""
    table = Table(
        "inputs, outputs, kernel, stride, side", "patches", "torch's kernel", "time of the choice", "chosen"
    )
    for shape in CONVOLUTIONS:
        inputs, outputs, kernel, stride, side = shape
        module = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2)
        x = torch.randn(64, inputs, side, side)
        delta = torch.randn_like(module(x))
        use = convolution(module, x, delta, 64)["weight"]
        assert isinstance(use, MatrixFactors)
        ways = {
            "patches": replace(use, direct=None),
            "torch": replace(use, direct=lambda a, b, c=(module, x, delta): per_sample_weight(
                c[0], c[1][a:b], c[2][a:b])),
        }  # fmt: skip
        out = torch.empty(64, use.rows, use.columns)
        took = timed(
            {name: lambda f=f, out=out: f.take(0, f.rows, out, add=False) for name, f in ways.items()},
            repeats,
        )
        chosen = "patches" if use.direct is None else "torch"
        best = min(took.values())
        table.add_row(str(shape), f"{took['patches']:.2f}", f"{took['torch']:.2f}",
                      f"{took[chosen] / best:.2f} x the faster", chosen)  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--convolutions", action="store_true", help="how gradients of convolutions are formed"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="only settings whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    if arguments.convolutions:
        Console(width=136).print(convolutions(arguments.repeats))
        return
    settings = [mlp(128), mlp(512), cnn(64), gpt(8, 32), gpt(16, 32), gpt(64, 32), gpt(256, 16)]
    settings = [s for s in settings if arguments.only in s.name]
    table = Table(
        "setting", "method", "ms", "of backlight", "extra MB", "of vmap", "above plain", "agreement, fp64",
        title=f"top-{TOP} eigenvalues of the second moment, one thread, processor time",
    )  # fmt: skip
    for setting in settings:
        methods: dict[str, Callable[[], Tensor]] = {
            "backlight": lambda s=setting: backlight_eigenvalues(s.model, s.batch),
            "backlight, checked": lambda s=setting: checked_eigenvalues(s.model, s.batch),
            "backlight, float64": lambda s=setting: backlight_eigenvalues(s.model, s.batch, torch.float64),
            **(
                {"backlight, 4 at once": lambda s=setting: backlight_eigenvalues(s.model, s.batch, at_once=4)}
                if setting.long
                else {}
            ),
            "torch.func.vmap": lambda s=setting: with_vmap(s.model, s.batch),
            **peers(setting),
        }
        took = timed(methods, arguments.repeats)
        methods["(forward and backward)"] = lambda s=setting: plain(s)
        took |= timed({"(forward and backward)": methods["(forward and backward)"]}, arguments.repeats)
        memory = {name: peak(method) for name, method in methods.items()}
        floor = memory["(forward and backward)"]
        reference = methods["torch.func.vmap"]()
        for name, method in methods.items():
            found = method().to(reference)
            off = float(((found - reference).abs() / reference).max()) if name[0] != "(" else float("nan")
            table.add_row(
                setting.name if name == "backlight" else "",
                name,
                f"{took[name]:.1f}",
                f"{took[name] / took['backlight']:.2f}",
                f"{memory[name]:.0f}",
                f"{memory[name] / memory['torch.func.vmap']:.2f}",
                f"{(memory[name] - floor) / (memory['torch.func.vmap'] - floor):.2f}"
                if name[0] != "("
                else "",
                f"{agreement(setting):.1e}"
                if name == "backlight"
                else ("" if math.isnan(off) else f"({off:.0e} in fp32)"),
            )
        table.add_section()
    console = Console(width=136)
    console.print(table)
    console.print(snapshots(settings))
    for note, where in NOTES.items():
        console.print(f"left out: {note} [{', '.join(where)}]", markup=False)


if __name__ == "__main__":
    main()
