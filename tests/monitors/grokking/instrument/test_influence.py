"""Influence on a held-out loss and the tangent kernel over a run, against gradients of single samples."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import backlight
from backlight.monitors.grokking.instrument.gram.checks import GramError
from backlight.monitors.grokking.instrument.probe_batch import SHOWN, KernelSeries, influences
from backlight.monitors.grokking.panels.influence import influence, summed_influences, tangent_kernel
from backlight.report.panel import Drawn, NotMeasured
from backlight.report.source import Source
from tiny_classifier import Batch, batch, net, summed


@pytest.mark.parametrize("rates", [(0.1, 0.1), (0.1, 0.02)])
def test_influences_add_up_to_the_drop_of_a_small_step(rates: tuple[float, float]) -> None:
    model, probe, held_out = net(), batch(6), batch(9)

    def sgd(model: nn.Sequential, factor: float) -> torch.optim.Optimizer:
        groups = [
            {"params": model[i].parameters(), "lr": factor * r} for i, r in zip((0, 2), rates, strict=True)
        ]
        return torch.optim.SGD(groups)

    pairs = influences(model, summed, probe, held_out, [sgd(model, 1.0)])
    assert pairs.shape == (6, 9)
    found = pairs.mean(1)
    for left_out in (None, 4):
        tiny, moved = 1e-6, copy.deepcopy(model)
        weights = torch.ones(6, dtype=torch.float64)
        if left_out is not None:
            weights[left_out] = 0
        losses = functional.cross_entropy(moved(probe[0]), probe[1], reduction="none")
        (weights * losses).mean().backward()
        sgd(moved, tiny).step()
        drop = float((summed(model, held_out) - summed(moved, held_out)).detach()) / 9 / tiny
        assert float(weights @ found) == pytest.approx(drop, rel=1e-4)
        for m in range(3):
            single = held_out[0][m : m + 1], held_out[1][m : m + 1]
            drop = float((summed(model, single) - summed(moved, single)).detach()) / tiny
            assert float(weights @ pairs[:, m]) == pytest.approx(drop, rel=1e-4, abs=1e-8)


def test_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(GramError, match="no optimizer holds a parameter of the model"):
        influences(net(), summed, batch(4), batch(4), [torch.optim.SGD(net().parameters())])


class Kept:
    """A recorder that keeps scalars."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def scalars(self, step: int, values: Any, source: str = "") -> None:
        self.values = dict(values)


def test_kernel_series_is_that_of_single_kernels() -> None:
    model, (x, y) = net(), batch(6)
    series, kept, start = KernelSeries(model), Kept(), backlight.ntk(model, x)
    for step in range(2):
        series.measure(step, (x, y), kept)  # type: ignore[arg-type]
        now = backlight.ntk(model, x)
        assert kept.values["ntk/distance"] == pytest.approx(now.distance(start), abs=1e-12)
        assert kept.values["ntk/alignment"] == pytest.approx(now.alignment(functional.one_hot(y, 3)))
        assert kept.values["ntk/trace"] == pytest.approx(float(now.matrix.trace()) / 6)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.5)
    assert kept.values["ntk/distance"] > 0.01
    wide = nn.Linear(5, 600)
    with pytest.raises(GramError, match="a sample has 600 outputs, expected 512 at most"):
        KernelSeries(wide).measure(0, x.float(), kept)  # type: ignore[arg-type]
    series = KernelSeries(wide)
    del wide
    with pytest.raises(GramError, match="the model does not exist any more"):
        series.measure(0, x.float(), kept)  # type: ignore[arg-type]


def train(path: Path | None, probe: Any, held_out: Batch) -> tuple[list[Tensor], Any]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measures = {"every": 1, "influence": 1, "ntk": 1, "gram": 0, "mean_gradient": 0, "vectors": 0, "agop": 0}
    watch = None
    if path is not None:
        samples = summed, probe, held_out
        watch = backlight.watch(
            model, optimizer, run=path, monitors=("grokking",), samples=samples, grokking=measures, quiet=True
        ).start()
    given = probe() if callable(probe) else probe
    for _ in range(6):
        optimizer.zero_grad()
        (summed(model, given) / len(given[0])).backward()
        optimizer.step()
    if watch is not None:
        watch.stop()
    return [p.detach() for p in model.parameters()], None if path is None else backlight.open_run(path)


@pytest.mark.slow
def test_watched_run_holds_influences_and_its_weights_are_unchanged(tmp_path: Path) -> None:
    torch.manual_seed(1)
    probe, held_out = batch(6), batch(9)
    plain, _ = train(None, probe, held_out)
    weights, run = train(tmp_path / "run", probe, held_out)
    assert all(map(torch.equal, weights, plain))
    steps, values = run.array("influence/samples")
    assert steps.tolist() == list(range(6))
    assert run.scalar("influence/drop").values == pytest.approx(np.stack(values).sum(1))
    losses = run.scalar("influence/held_out_loss").values
    assert run.scalar("influence/drop").values[:-1] == pytest.approx(-np.diff(losses), rel=0.2)
    total = summed_influences(run)
    assert total is not None
    drawn = influence(Source(run, ()))
    assert isinstance(drawn, Drawn)
    best = drawn.facts[0].value.split(" ")[0]
    assert int(best) == int(total.argmax())
    pairs = summed_influences(run, "influence/pairs")
    assert pairs is not None
    assert pairs.shape == (6, min(9, SHOWN))
    assert pairs.mean(1) == pytest.approx(total, rel=1e-5)
    fact = drawn.facts[2]
    m = int(fact.label.rpartition(" ")[2])
    assert m == int(np.abs(pairs.sum(0)).argmax())
    assert fact.value.partition("most by ")[2].startswith(f"{np.abs(pairs[:, m]).argmax()} (")
    assert isinstance(tangent_kernel(Source(run, ())), Drawn)


@pytest.mark.slow
def test_samples_of_a_batch_that_changes_are_not_summed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    probe, held_out = batch(6), batch(9)
    with pytest.warns(RuntimeWarning, match="a probe batch that changes has no distance from its start"):
        _, run = train(tmp_path / "run", lambda: probe, held_out)
    assert summed_influences(run) is None
    assert isinstance(tangent_kernel(Source(run, ())), NotMeasured)
    drawn = influence(Source(run, ()))
    assert isinstance(drawn, Drawn)
    assert drawn.facts == ()


@pytest.mark.slow
def test_example_agrees_with_leaving_samples_out(tmp_path: Path) -> None:
    script = Path(__file__).parents[4] / "examples" / "influence.py"
    command = [sys.executable, str(script), "--run", "run", "--steps", "40"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    assert float(last.rpartition(" ")[2]) > 0.95
    assert done.stdout.count("wrong label") >= 3
    assert "ntk/distance" in backlight.open_run(tmp_path / "run").scalar_names()
