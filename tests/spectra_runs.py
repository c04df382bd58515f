"""Synthetic runs of the spectra monitor: measured replicates with injected directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backlight.measure.spectra.measurement import SpectralEcho, spectral_echo
from backlight.measure.spectra.shrinkage import threshold
from backlight.monitors.spectra.model.echo_records import (
    record_arrays,
    record_layer,
    record_left_out,
    record_measured,
)
from backlight.store.read.run import Run
from backlight.store.spectra import Layer
from backlight.store.write.writer import RunWriter
from run_builder import build_run

SHAPES = {"blocks.0.attn.qkv.weight": (40, 24), "blocks.0.mlp.up.weight": (32, 32), "head.weight": (20, 36)}
STRENGTHS = {
    "blocks.0.attn.qkv.weight": (6.0, 4.0, 2.5),
    "blocks.0.mlp.up.weight": (8.0, 3.0),
    "head.weight": (5.0,),
}


@dataclass(frozen=True)
class Injected:
    """Plan of a run: strengths in units of the detection threshold."""

    steps: tuple[int, ...] = (0, 100, 200)
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=lambda: dict(SHAPES))
    strengths: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: dict(STRENGTHS))
    replicates: int = 12
    batch: float = 4.0
    decay: float = 0.8
    update_ranks: tuple[float, ...] = ()
    checkpoints: bool = False


def replicates(plan: Injected, name: str, at: int) -> torch.Tensor:
    """Return ``[R, p, q]``: the injected directions in noise of variance 1."""
    p, q = plan.shapes[name]
    noise = torch.Generator().manual_seed(1000 * at + sorted(plan.shapes).index(name))
    signal = torch.Generator().manual_seed(sorted(plan.shapes).index(name))
    strength = torch.tensor(plan.strengths.get(name, ())) * threshold(1.0, p, q) * plan.decay**at
    amount = len(strength)
    G = torch.randn(plan.replicates, p, q, generator=noise)
    if amount:
        U, V = (torch.linalg.qr(torch.randn(n, amount, generator=signal))[0] for n in (p, q))
        G = G + (U * strength) @ V.T
    return 1e-3 * G


def record(writer: RunWriter, step: int, parameter: str, result: SpectralEcho, **measured: Any) -> None:
    """Write arrays and numbers of a layer at a step."""
    record_arrays(writer, step, parameter, result)
    record_measured(writer, step, parameter, result, **measured)


def write_spectra(writer: RunWriter, plan: Injected) -> None:
    """Write the records of the spectra monitor into a run."""
    for index, (name, (p, q)) in enumerate(plan.shapes.items()):
        record_layer(writer, Layer(name, name.rpartition(".")[0], (p, q), "", p, q, index))
    record_left_out(writer, "norm.weight", "one-dimensional")
    for at, step in enumerate(plan.steps):
        if plan.checkpoints:
            writer.event(step, "spectra_checkpoint", {"path": f"{step}.pt", "weights": "0"})
        for name in plan.shapes:
            ranks: dict[str, float | None] = {"weight": 9.5 - at, "gradient": 2.0 + at, "momentum": None}
            if plan.update_ranks:
                ranks["update"] = plan.update_ranks[at]
            found = spectral_echo(replicates(plan, name, at), layer=name, null_draws=2)
            record(writer, step, name, found, batch=plan.batch, stable_ranks=ranks)


def write_spectra_run(path: Path, plan: Injected | None = None) -> Run:
    """Write a run by ``plan``, or a further attempt of one, and open it."""
    return build_run(
        path, name="spectra", script="train.py", monitors=("spectra",), step_offset=0, resume=path.exists(),
        write=partial(write_spectra, plan=plan or Injected()),
    )  # fmt: skip
