"""Synthetic runs of the grokking monitor: accuracies and geometry follow a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from backlight.store.read.run import Run
from backlight.store.write.writer import RunWriter
from run_builder import build_run

CHANCE, SIZE = 1 / 23, 265
LAYERS = ("embed", "blocks.0", "head")


@dataclass(frozen=True)
class Grok:
    """Plan of a run: when it generalises, what it records, and its control."""

    steps: int = 2000
    every: int = 10
    generalises: float = 900.0
    control: str = ""
    control_of: str = ""
    accuracies: bool = True
    geometry: bool = True
    seed: int = 0
    decay: float = 1.0


def sigmoid(steps: NDArray[np.int64], at: float, width: float) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-np.clip((steps - at) / width, -60, 60)))


def accuracies(plan: Grok, steps: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return train and test accuracy [S]; a control never generalises."""
    draw = np.random.default_rng(plan.seed)
    train = sigmoid(steps, 22, 2)
    train = np.where(train > 0.995, 1.0, train)
    learned = np.zeros(len(steps)) if plan.control else sigmoid(steps, plan.generalises, 30)
    test = CHANCE + (1 - CHANCE) * learned + draw.normal(0, 0.008, len(steps))
    test = np.where(learned > 0.999, 1.0, np.clip(test, 0.01, 1))
    return train, np.rint(test * SIZE) / SIZE


def write_scalars(path: Path, *rows: tuple[int, dict[str, float]]) -> Run:
    """Write a run with scalars of the user, as (step, values), and open it."""
    logged: dict[int, dict[str, float]] = {}
    for step, values in rows:
        logged.setdefault(step, {}).update(values)
    return build_run(path, monitors=("grokking",), user=logged)


def write_grokking_run(path: Path, plan: Grok | None = None) -> Run:
    """Write a run by ``plan`` and open it."""
    write = partial(write_grokking, plan=plan or Grok())
    return build_run(path, name="oracle", script="grok", monitors=("grokking",), write=write)


def write_grokking(writer: RunWriter, plan: Grok) -> None:
    """Write the records of the grokking monitor into a run."""
    facts = {
        "experiment": "oracle", "control": plan.control, "control_of": plan.control_of,
        "chance": CHANCE, "train_size": 264, "test_size": SIZE, "seed": plan.seed,
        "settings": {"p": 23, "seed": plan.seed, "training": {"weight_decay": plan.decay}},
        "sample_unit": "pair", "probe_size": 128,
    }  # fmt: skip
    writer.event(0, "grokking", facts)
    steps = np.arange(0, plan.steps + 1, plan.every)
    train, test = accuracies(plan, steps)
    draw = np.random.default_rng(plan.seed + 7)
    learned = np.zeros(len(steps)) if plan.control else sigmoid(steps, plan.generalises - 60, 60)
    for row, step in enumerate(steps.tolist()):
        logged = {"train_loss": 0.04 * (1.02 - train[row]), "test_loss": 0.05 * (1.05 - test[row])}
        if plan.accuracies:
            logged |= {"train_accuracy": train[row], "test_accuracy": test[row]}
        if plan.geometry and row % 5 == 0:
            noise = float(draw.normal(0, 0.01))
            logged["progress/fourier_ipr"] = 0.1 + 0.4 * learned[row] + noise
            logged["progress/weight_norm"] = 20 * np.exp(-step / 900) + 8 + noise
            _geometry(writer, step, float(learned[row]), draw, plan.steps)
        writer.scalars(step, {k: float(v) for k, v in logged.items()}, source="user")
        if row % 100 == 99:
            writer.flush()


def _geometry(writer: RunWriter, step: int, learned: float, draw: np.random.Generator, steps: int) -> None:
    fall = np.exp(-3 * step / steps) + 0.01
    eigen = fall * 0.7 ** np.arange(20) * np.exp(draw.normal(0, 0.05, 20))
    eigen = np.sort(eigen)[::-1]
    centred = eigen * 0.6
    values: dict[str, float] = {"gradient/norm": float(np.sqrt(eigen.sum()))}
    for scope, factor in (("model", 1.0), *((f"layer/{name}", 0.3) for name in LAYERS)):
        spectrum = eigen * factor
        head = f"gram/{scope}"
        values |= {
            f"{head}/trace": float(spectrum.sum()),
            f"{head}/frobenius": float(np.sqrt((spectrum**2).sum())),
            f"{head}/spectral": float(spectrum[0]),
            f"{head}/nuclear": float(spectrum.sum()),
            f"{head}/effective_rank": 3.0 + 2 * learned + float(draw.normal(0, 0.05)),
            f"{head}/participation_ratio": 2.5 + learned,
            f"{head}/numerical_rank": 20.0,
            f"{head}/coherence": 0.2 + 0.5 * learned + float(draw.normal(0, 0.01)),
            f"{head}/noise_scale": 40.0 / (1 + 5 * learned),
            f"{head}/explained_10": 0.97,
            f"{head}/centred/trace": float(0.6 * spectrum.sum()),
            f"{head}/centred/effective_rank": 4.0 + learned,
        }
    values |= {"window/effective_rank": 5.0 - 3 * learned, "window/explained_1": 0.4 + 0.4 * learned}
    values |= {"agop/trace": fall, "agop/circulant_deviation": 0.5 - 0.45 * learned}
    values |= {"product/head.weight/effective_rank": 6.0 - learned, "product/head.weight/trace": fall}
    values |= {"influence/drop": 0.01 * learned, "influence/held_out_loss": 2.0 - learned}
    values |= {"ntk/alignment": 0.1 + 0.5 * learned, "ntk/distance": 0.3 * learned, "ntk/trace": 20.0}
    if not step:
        writer.event(step, "influence", {"is_fixed": True})
    writer.array("influence/samples", step, 0.01 * learned * np.linspace(-0.5, 1.5, 6), dims=("sample",))
    writer.scalars(step, values)
    for name, spectrum in (
        ("gram/model/eigenvalues", eigen),
        ("gram/model/centred_eigenvalues", centred),
        ("window/eigenvalues", eigen[:8]),
        ("agop/eigenvalues", eigen[:12]),
        ("product/head.weight/eigenvalues", eigen[:6]),
    ):
        writer.array(name, step, spectrum, dims=("k",))
