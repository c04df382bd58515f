"""The verdict on grokking must not be given where there is no delay, and no gradual rise called sharp.

Two statements, each with nulls of its own: the verdict, whose definition is the delay, and the sharpness of
the rise. Late and gradual rises are nulls of the second: the verdict must be grokking, the rise not sharp.

Nulls that train: the fast oracle with a weight decay of .1, with random labels, with a training share
of .8 to .9, with a curriculum; the linear teacher and student at lambda = 2, far from the
interpolation threshold, whose accuracy is the share of samples within a tolerance. Nulls that are
curves: recoveries from instability, zero-filled logs, values carried forward, partial plateaus, noise
around a threshold, slow ends, logs out of order and repeated, epoch-wise double descent, steep power laws
from the fit, nets that fit in five steps, and curricula. Gradual: power laws, lines, exponentials. Positives:
the fast oracle at even and at logarithmic logs, sparse parity (two classes, chance .5), and curves.
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

from backlight.experiments import config
from backlight.monitors.grokking.model.detection import detect
from backlight.monitors.grokking.model.verdicts import Detection, GrokkingVerdict

CHANCE, SIZE = 1 / 23, 265
STEPS = np.arange(0, 5001, 10)


def trained(
    *,
    seed: int,
    steps: int,
    every: int = 10,
    logarithmic: bool = False,
    weight_decay: float = 1.0,
    train_share: float = 0.5,
    control: str = "",
    scale: float = 1.0,
) -> Detection:
    """Train the fast oracle and return its verdict; ``scale`` multiplies its initial weights.

    ``logarithmic`` logs 60 times, evenly over the logarithm of the steps.
    """
    settings = config.SETTINGS
    settings = dataclasses.replace(
        settings,
        data=dataclasses.replace(settings.data, train_share=train_share),
        training=dataclasses.replace(settings.training, weight_decay=weight_decay),
    )
    task = config.build(settings, seed, "cpu", control)
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.mul_(scale)
    rows = []
    logs = set(
        np.geomspace(1, steps, 60).round().astype(int).tolist() if logarithmic else range(0, steps + 1, every)
    )
    for step in range(steps + 1):
        if step in logs:
            values = task.evaluate(thorough=False)
            rows.append((step, values["train_accuracy"], values["test_accuracy"]))
        task.train_step(step)
    at, train, test = np.array(rows).T
    sizes = len(task.split.train_inputs), len(task.split.test_inputs)
    return detect(at, train, at, test, chance=task.chance, train_size=sizes[0], test_size=sizes[1])


def curriculum(seed: int, *, switch: int = 1000, steps: int = 2000) -> Detection:
    """Train the fast oracle on a third of its pairs, then on all; with the training accuracy of those."""
    settings = config.SETTINGS
    settings = dataclasses.replace(settings, data=dataclasses.replace(settings.data, train_share=0.75))
    task = config.build(settings, seed, "cpu", "")
    whole, rows = task.split, []
    first = dataclasses.replace(
        whole, train_inputs=whole.train_inputs[:132], train_labels=whole.train_labels[:132]
    )
    for step in range(steps + 1):
        task.split = first if step < switch else whole
        if step % 10 == 0:
            values = task.evaluate(thorough=False)
            rows.append((step, values["train_accuracy"], values["test_accuracy"]))
        task.train_step(step)
    at, train, test = np.array(rows).T
    size = len(whole.test_inputs)
    return detect(at, train, at, test, chance=task.chance, train_size=len(whole.train_inputs), test_size=size)


PARITY_BITS, PARITY_PAIRS, PARITY_TEST = 30, 500, 500


def sparse_parity(seed: int, *, steps: int = 8000, every: int = 20) -> Detection:
    """Train a net of one hidden layer on the parity of 3 of 30 bits: two classes, chance .5.

    Hinge loss, full batch, AdamW (Barak et al. 2207.08799, Merrill et al. 2303.11873).
    """
    draw = torch.Generator().manual_seed(seed)
    count = PARITY_PAIRS + PARITY_TEST
    bits = torch.randint(0, 2, (count, PARITY_BITS), generator=draw).float() * 2 - 1
    label = bits[:, :3].prod(1)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(PARITY_BITS, 200), torch.nn.ReLU(), torch.nn.Linear(200, 1), torch.nn.Flatten(0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    rows = []
    for step in range(steps + 1):
        if step % every == 0:
            with torch.no_grad():
                right = (model(bits) * label > 0).double()
            rows.append((step, float(right[:PARITY_PAIRS].mean()), float(right[PARITY_PAIRS:].mean())))
        optimizer.zero_grad()
        (1 - model(bits[:PARITY_PAIRS]) * label[:PARITY_PAIRS]).relu().mean().backward()
        optimizer.step()
    at, train, test = np.array(rows).T
    return detect(at, train, at, test, chance=0.5, train_size=PARITY_PAIRS, test_size=PARITY_TEST)


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


def _counted(share: np.ndarray, draw: np.random.Generator, noise: float = 0.01) -> np.ndarray:
    """Return shares of SIZE samples with noise."""
    return np.rint(np.clip(share + draw.normal(0, noise, len(share)), 0.004, 1) * SIZE) / SIZE


def _in_decades(at: float, width: float, steps: np.ndarray = STEPS) -> np.ndarray:
    """Return a logistic rise from 0 to 1 over the logarithm of steps, ``width`` in decades."""
    away = (np.log10(np.maximum(steps, 1)) - np.log10(at)) / width
    return 1 / (1 + np.exp(-np.clip(away, -60, 60)))


def _rise(at: float, width: float, low: float, high: float, draw: np.random.Generator) -> np.ndarray:
    share = low + (high - low) / (1 + np.exp(-np.clip((STEPS - at) / width, -60, 60)))
    return _counted(share, draw)


def _fitted(at: float) -> np.ndarray:
    train = 1 / (1 + np.exp(-np.clip((STEPS - at) / 2, -60, 60)))
    return np.where(train > 0.995, 1.0, train)


def _judged(
    train: np.ndarray, test: np.ndarray, steps: np.ndarray = STEPS, chance: float = CHANCE
) -> Detection:
    return detect(steps, train, steps, test, chance=chance, train_size=264, test_size=SIZE)


def delayed(seed: int, chance: float = CHANCE) -> Detection:
    """Evaluate a curve that does grok."""
    draw = np.random.default_rng(seed)
    test = _rise(draw.uniform(600, 2500), draw.uniform(10, 80), chance, 1.0, draw)
    return _judged(_fitted(25), test, chance=chance)


def delayed_at_logarithmic_logs(seed: int, logs: int, chance: float = CHANCE) -> Detection:
    """Evaluate a curve that does grok, logged ``logs`` times from step 1 to 5000, evenly over log steps."""
    draw = np.random.default_rng(3000 + seed)
    steps = np.unique(np.geomspace(1, 5000, logs).round().astype(int))
    share = _in_decades(draw.uniform(600, 2000), draw.uniform(0.02, 0.07), steps)
    test = _counted(chance + (1 - chance) * share, draw)
    return _judged(np.where(steps >= 25, 1.0, 0.9 * steps / 25), test, steps, chance)


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


def shapes(repeats: int = 25) -> Iterator[tuple[str, Detection]]:
    """Yield named nulls of shapes that fit early and are good late, ``repeats`` of each.

    Chance is 1/23, or .5 in those of two classes.
    """
    for seed in range(repeats):
        draw = np.random.default_rng(2000 + seed)
        fit, way = _fitted(25), 1 - CHANCE
        late = draw.uniform(500, 2500)

        # Epoch-wise double descent (Nakkiran et al. 1912.02292): up, down around the fit, up again.
        def descent(
            peak: float, trough: float, low: float = CHANCE, width: float = 0.15, late: float = late
        ) -> np.ndarray:
            first = peak * _in_decades(10, 0.1) - (peak - trough) * _in_decades(40, 0.08)
            return low + (1 - low) * (first + (1 - trough) * _in_decades(late, width))

        for name, peak, trough in (
            ("deep", draw.uniform(0.5, 0.8), draw.uniform(0.05, 0.2)),
            ("shallow", draw.uniform(0.5, 0.7), draw.uniform(0.3, 0.4)),
        ):
            yield f"double descent, {name}", _judged(fit, _counted(descent(peak, trough), draw))
        sharp = descent(draw.uniform(0.5, 0.8), draw.uniform(0.05, 0.2), width=0.05)
        yield "double descent, deep, sharp end", _judged(fit, _counted(sharp, draw))
        two = _counted(descent(draw.uniform(0.6, 0.8), draw.uniform(0.1, 0.2), low=0.5), draw)
        yield "double descent, two classes", _judged(fit, two, chance=0.5)
        gone = np.maximum(STEPS, 1) / 25
        law = CHANCE + way * (1 - np.minimum(1, gone ** -draw.uniform(1.0, 2.0)))
        yield "power law from the fit, steep", _judged(fit, _counted(law, draw))
        soon = np.arange(0, 400)
        fast_fit = np.where(soon >= 5, 1.0, soon / 5)
        at, width = draw.uniform(15, 24), draw.uniform(0.5, 2)
        fast = _counted(CHANCE + way / (1 + np.exp(-np.clip((soon - at) / width, -60, 60))), draw)
        yield "fits in 5 steps, generalises in 30", _judged(fast_fit, fast, soon)
        two = _counted(0.5 + 0.5 / (1 + np.exp(-np.clip((soon - at) / width, -60, 60))), draw)
        yield "fits in 5 steps, two classes", _judged(fast_fit, two, soon, chance=0.5)
        # A curriculum: the training accuracy drops when other data come, and the test accuracy follows.
        switch = float(np.round(draw.uniform(500, 2000), -1))
        again = np.where(switch > STEPS, 1, draw.uniform(0.2, 0.8))
        again = np.where(switch + draw.uniform(20, 80) > STEPS, again, 1) * fit
        after = CHANCE + way * np.where(switch > STEPS, 0.05, 1 - np.exp(-(STEPS - switch) / 15))
        yield "curriculum, one stage", _judged(again, _counted(after, draw))
        switches = np.round(draw.uniform(0.2, 0.3) * late * np.arange(1, 5), -1)
        stage = np.searchsorted(switches, STEPS, side="right")
        new = np.isin(STEPS, switches) | np.isin(STEPS, switches + 10)
        again = np.where(new, draw.uniform(0.5, 0.85), 1) * fit
        yield "curriculum, four stages", _judged(again, _counted(CHANCE + way * stage / 4, draw))
        coin = _counted(np.full(len(STEPS), 0.5), draw, noise=0.03)
        yield "two classes, memorised", _judged(fit, coin, chance=0.5)


def gradual(repeats: int = 25) -> Iterator[tuple[str, Detection]]:
    """Yield named rises that come late and without a transition, ``repeats`` of each."""
    for seed in range(repeats):
        draw = np.random.default_rng(4000 + seed)
        fit, way, decades = _fitted(25), 1 - CHANCE, np.log10(np.maximum(STEPS, 1))
        law = CHANCE + way * (1 - np.minimum(1, (np.maximum(STEPS, 1) / 25) ** -draw.uniform(0.3, 0.6)))
        yield "power law from the fit, slow", _judged(fit, _counted(law, draw))
        tau, power = draw.uniform(200, 1000), draw.uniform(0.7, 3)
        yield "power law", _judged(fit, _counted(1 - way * (1 + STEPS / tau) ** -power, draw))
        yield "exponential", _judged(fit, _counted(1 - way * np.exp(-STEPS / draw.uniform(200, 1200)), draw))
        line = np.clip((STEPS - 25) / draw.uniform(800, 4000), 0, 1)
        yield "line", _judged(fit, _counted(CHANCE + way * line, draw))
        in_log = np.clip((decades - np.log10(25)) / draw.uniform(1.2, 2.2), 0, 1)
        yield "line over log steps", _judged(fit, _counted(CHANCE + way * in_log, draw))
        wide = CHANCE + way * _in_decades(draw.uniform(300, 900), draw.uniform(0.25, 0.5))
        yield "wide rise", _judged(fit, _counted(wide, draw))
        logs = np.unique(np.geomspace(1, 5000, 60).round().astype(int))
        law = 1 - way * (1 + logs / 300) ** -draw.uniform(0.7, 2)
        fitted = np.where(logs >= 25, 1.0, logs / 25)
        yield "power law, logarithmic logs", _judged(fitted, _counted(law, draw), logs)


def training_nulls(seeds: int) -> Iterator[tuple[str, Detection]]:
    """Yield named nulls that train, ``seeds`` of each kind."""
    for seed in range(seeds):
        yield "weight decay .1", trained(seed=seed, steps=5000, weight_decay=0.1)
        yield "random labels", trained(seed=seed, steps=2000, control="random-labels")
        for share in (0.8, 0.85, 0.9):
            yield f"training share {share:g}", trained(seed=seed, steps=600, train_share=share)
        yield "initialisation x 1, weight decay .1", trained(seed=100 + seed, steps=2000, weight_decay=0.1)
        yield "curriculum, trained", curriculum(seed)
        yield "linear, lambda 2", linear(seed, ratio=2.0)
        yield "linear, lambda 1/2", linear(seed, ratio=0.5)


def positives(seeds: int, repeats: int) -> Iterator[tuple[str, Detection]]:
    """Yield named runs that grok, ``seeds`` of those that train and ``repeats`` of the curves."""
    for seed in range(seeds):
        yield "fast oracle", trained(seed=seed, steps=2000)
        yield "fast oracle, logarithmic logs", trained(seed=seed, steps=3000, logarithmic=True)
        yield "sparse parity, two classes", sparse_parity(seed)
    for seed in range(repeats):
        yield "curve", delayed(seed)
        yield "curve, two classes", delayed(seed, chance=0.5)
        for logs in (40, 60, 100):
            yield f"curve, {logs} logarithmic logs", delayed_at_logarithmic_logs(seed, logs)
        yield "curve, two classes, 60 logarithmic logs", delayed_at_logarithmic_logs(seed, 60, chance=0.5)


def _printed(rows: Iterator[tuple[str, Detection]], console: Console) -> tuple[list[Detection], int]:
    """Print the verdicts on each kind of ``rows``; return all of them, and how many are grokking."""
    kinds: dict[str, list[Detection]] = {}
    for name, detection in rows:
        kinds.setdefault(name, []).append(detection)
    table = Table("kind", "runs", "grokking", "verdicts", "rises of grokking", box=None)
    for name, detections in kinds.items():
        verdicts = collections.Counter(detection.words for detection in detections)
        shapes = collections.Counter(_sharpness(d) for d in detections if _grokking(d))
        table.add_row(
            name,
            str(len(detections)),
            str(sum(map(_grokking, detections))),
            *(", ".join(f"{word} {n}" for word, n in of.most_common()) for of in (verdicts, shapes)),
        )
    console.print(table)
    everything = [detection for detections in kinds.values() for detection in detections]
    return everything, sum(map(_grokking, everything))


def _grokking(detection: Detection) -> bool:
    return detection.verdict is GrokkingVerdict.GROKKING


def _sharpness(detection: Detection) -> str:
    return detection.transition.sharpness.value if detection.transition else "not observed"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=8, help="of each run that trains")
    options.add_argument("--repeats", type=int, default=25, help="of each curve")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    nulls = (*training_nulls(chosen.seeds), *synthetic(chosen.repeats), *shapes(chosen.repeats))
    runs, false = _printed(iter(nulls), console)
    console.print(f"{false} of {len(runs)} nulls called grokking ({false / len(runs):.1%})")
    rises, late = _printed(gradual(chosen.repeats), console)
    sharp = sum(_sharpness(detection) == "sharp" for detection in rises)
    console.print(
        f"{late} of {len(rises)} late and gradual rises called grokking ({late / len(rises):.1%}), "
        f"{sharp} of them sharp ({sharp / len(rises):.1%})"
    )
    positive, hits = _printed(positives(chosen.seeds, chosen.repeats), console)
    blunt = sum(_sharpness(detection) == "gradual" for detection in positive)
    console.print(
        f"{hits} of {len(positive)} positives called grokking ({hits / len(positive):.1%}), "
        f"{blunt} of them gradual ({blunt / len(positive):.1%})"
    )
    if false > 0.01 * len(runs) or sharp > 0.01 * len(rises) or hits < 0.95 * len(positive):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
