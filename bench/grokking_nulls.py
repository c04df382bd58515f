"""The verdict on grokking must not be given where there is none: more than 100 nulls, and positives found.

Nulls that train: the fast oracle with a weight decay of .1, with random labels, with a training share
of .8 to .9, with a small initialisation; and the linear teacher and student at lambda = 2, far from the
interpolation threshold, whose accuracy is the share of samples within a tolerance. Nulls that are
curves: recoveries from instability, zero-filled logs, values carried forward, partial plateaus, noise
around a threshold, slow ends, logs out of order and repeated.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from backlight.experiments import oracle
from backlight.monitors.grokking.model.detection import detect
from backlight.monitors.grokking.model.verdicts import Detection, GrokkingVerdict

CHANCE, SIZE = 1 / 23, 265
STEPS = np.arange(0, 5001, 10)


def trained(
    *,
    seed: int,
    steps: int,
    every: int = 10,
    weight_decay: float = 1.0,
    train_share: float = 0.5,
    control: str = "",
    scale: float = 1.0,
) -> Detection:
    """Train the fast oracle and return its verdict; ``scale`` multiplies its initial weights."""
    settings = oracle.SETTINGS
    settings = dataclasses.replace(
        settings,
        data=dataclasses.replace(settings.data, train_share=train_share),
        training=dataclasses.replace(settings.training, weight_decay=weight_decay),
    )
    task = oracle.build(settings, seed, "cpu", control)
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.mul_(scale)
    rows = []
    for step in range(steps + 1):
        if step % every == 0:
            values = task.evaluate(thorough=False)
            rows.append((step, values["train_accuracy"], values["test_accuracy"]))
        task.train_step(step)
    at, train, test = np.array(rows).T
    sizes = len(task.split.train_inputs), len(task.split.test_inputs)
    return detect(at, train, at, test, chance=task.chance, train_size=sizes[0], test_size=sizes[1])


def linear(seed: int, *, ratio: float, steps: int = 4000, inputs: int = 100) -> Detection:
    """Evaluate a linear student at lambda = inputs / samples under gradient descent (Levi et al. 2310.16441).

    The accuracy is the share of samples whose squared error is below 1e-2 of the teacher's variance.
    """
    draw = np.random.default_rng(seed)
    samples = round(inputs / ratio)
    x, held_out = draw.normal(0, 1, (samples, inputs)), draw.normal(0, 1, (2000, inputs))
    teacher, student = draw.normal(0, inputs**-0.5, inputs), draw.normal(0, inputs**-0.5, inputs)
    covariance = x.T @ x / samples
    rate = 0.5 / np.linalg.eigvalsh(covariance)[-1]
    apart, rows = student - teacher, []
    for step in range(steps + 1):
        if step % 10 == 0:
            rows.append((step, np.mean((x @ apart) ** 2 < 1e-2), np.mean((held_out @ apart) ** 2 < 1e-2)))
        apart = apart - 2 * rate * covariance @ apart
    at, train, test = np.array(rows).T
    return detect(at, train, at, test, chance=0.0, train_size=samples, test_size=2000)


def _rise(at: float, width: float, low: float, high: float, draw: np.random.Generator) -> np.ndarray:
    share = low + (high - low) / (1 + np.exp(-np.clip((STEPS - at) / width, -60, 60)))
    return np.rint(np.clip(share + draw.normal(0, 0.01, len(STEPS)), 0.004, 1) * SIZE) / SIZE


def _fitted(at: float) -> np.ndarray:
    train = 1 / (1 + np.exp(-np.clip((STEPS - at) / 2, -60, 60)))
    return np.where(train > 0.995, 1.0, train)


def _judged(train: np.ndarray, test: np.ndarray, steps: np.ndarray = STEPS) -> Detection:
    return detect(steps, train, steps, test, chance=CHANCE, train_size=264, test_size=SIZE)


def delayed(seed: int) -> Detection:
    """Evaluate a curve that does grok."""
    draw = np.random.default_rng(seed)
    return _judged(_fitted(25), _rise(draw.uniform(600, 2500), draw.uniform(10, 80), CHANCE, 1.0, draw))


def synthetic(repeats: int = 6) -> Iterator[tuple[str, Detection]]:
    """Yield named nulls that are curves, ``repeats`` of each kind."""
    for seed in range(repeats):
        draw = np.random.default_rng(1000 + seed)
        when = draw.uniform(400, 900)
        crash = (when < STEPS) & (when + draw.uniform(200, 900) > STEPS)
        fast, fit = _rise(40, 6, CHANCE, 1.0, draw), _fitted(25)
        low = _rise(1e9, 1, CHANCE, 1.0, draw)
        late = draw.uniform(800, 3000)
        yield "recovery: both crash", _judged(np.where(crash, CHANCE, fit), np.where(crash, CHANCE, fast))
        half = _rise(40, 6, CHANCE, 0.85, draw)
        back = _rise(late, 30, CHANCE, 1.0, draw)
        yield "recovery: test comes back late", _judged(fit, np.where(when > STEPS, half, back))
        shaky = np.where(draw.random(len(STEPS)) < 0.15, 0.6, fit)
        yield "training accuracy shakes", _judged(shaky, back)
        yield "zeros until the first evaluation", _judged(fit, np.where(late > STEPS, 0.0, fast))
        yield "zeros between evaluations", _judged(fit, np.where(STEPS % 100, 0.0, fast))
        yield "zeros between evaluations, close", _judged(fit, np.where(STEPS % 30, 0.0, fast))
        forward = fast[np.searchsorted(STEPS, np.floor(STEPS / 1000) * 1000)]
        yield "value carried forward", _judged(fit, forward)
        yield "low plateau", _judged(fit, _rise(late, 50, CHANCE, draw.uniform(0.1, 0.4), draw))
        yield "slow end", _judged(fit, np.where(late > STEPS, 0.9 + 0.02 * (STEPS / late), 0.99))
        around = np.clip(draw.normal(0.95, 0.02, len(STEPS)), 0, 1)
        yield "noise around the line", _judged(fit, np.where(STEPS < 30, low, around))
        order = draw.permutation(len(STEPS))
        yield "memorised, out of order", _judged(fit[order], low[order], STEPS[order])
        twice = np.concatenate([STEPS, STEPS])
        doubled = _judged(np.concatenate([fit, fit]), np.concatenate([low, fast]), twice)
        yield "logged twice, the later one fast", doubled
        holes = np.where(draw.random(len(STEPS)) < 0.5, np.nan, low)
        yield "memorised, half of the logs NaN", _judged(fit, holes)
        late_test = np.where(late > STEPS, np.nan, fast)
        yield "test accuracy only logged late", _judged(fit, late_test)


def training_nulls(seeds: int) -> Iterator[tuple[str, Detection]]:
    """Yield named nulls that train, ``seeds`` of each kind."""
    for seed in range(seeds):
        yield "weight decay .1", trained(seed=seed, steps=5000, weight_decay=0.1)
        yield "random labels", trained(seed=seed, steps=2000, control="random-labels")
        for share in (0.8, 0.85, 0.9):
            yield f"training share {share:g}", trained(seed=seed, steps=600, train_share=share)
        yield "initialisation x 1, weight decay .1", trained(seed=100 + seed, steps=2000, weight_decay=0.1)
        yield "linear, lambda 2", linear(seed, ratio=2.0)
        yield "linear, lambda 1/2", linear(seed, ratio=0.5)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=8, help="of each null that trains")
    options.add_argument("--repeats", type=int, default=8, help="of each null that is a curve")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    counted: dict[str, collections.Counter[str]] = {}
    nulls = false = 0
    for name, found in (*training_nulls(chosen.seeds), *synthetic(chosen.repeats)):
        counted.setdefault(name, collections.Counter())[found.verdict.value] += 1
        nulls += 1
        false += found.verdict is GrokkingVerdict.GROKKING
    positives = [trained(seed=seed, steps=2000) for seed in range(chosen.seeds)]
    curves = [delayed(seed) for seed in range(chosen.repeats)]
    table = Table("null", "runs", "called grokking", "verdicts", box=None)
    for name, verdicts in counted.items():
        listed = ", ".join(f"{verdict} {amount}" for verdict, amount in verdicts.most_common())
        table.add_row(name, str(verdicts.total()), str(verdicts["grokking"]), listed)
    console = Console()
    console.print(table)
    console.print(f"{false} of {nulls} nulls called grokking")
    for name, group in (("fast oracle", positives), ("delayed curves", curves)):
        found = [d for d in group if d.verdict is GrokkingVerdict.GROKKING]
        times = [(d.memorised.by, d.generalised.by) for d in found if d.memorised and d.generalised]
        spans = "; ".join(f"{min(t)} to {max(t)}" for t in zip(*times, strict=True))
        console.print(f"{name}: {len(found)} of {len(group)} called grokking, t_m and t_g {spans}")
    if false:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
