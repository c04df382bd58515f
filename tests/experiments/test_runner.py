"""Experiment runs: kill and resume, tiers, cost estimates, refusals."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import backlight
from backlight.experiments import runner
from backlight.experiments.config import Configuration, ConfigurationError, assigned, configure
from backlight.experiments.cost import MEASURED as MEASURED_PARTS
from backlight.experiments.cost import Choice, Cost, DoesNotFitError, Estimate, choose, estimate_of
from backlight.experiments.runner import TrainingProgress, run_experiment
from backlight.monitors.grokking.model.measures import TIERS, at_tier
from backlight.monitors.grokking.panels.influence import influence, summed_influences
from backlight.monitors.grokking.settings import Measures
from backlight.records import RunStatus
from backlight.report.panel import Drawn
from backlight.report.source import Source
from backlight.store.errors import RunExistsError

SETTINGS = (
    "training.steps=120",
    "training.log_every=5",
    "run.checkpoint_every=20",
    "run.flush_seconds=0.1",
    "run.disk_free=0",
    "measures.gram=4",
    "measures.sketch=4",
    "measures.ntk=4",
    "measures.window_steps=6",
)
MEASURED = list(MEASURED_PARTS)
OFF = [f"measures.{name}=0" for name in MEASURED]


def configuration(*more: str) -> Configuration:
    return configure("oracle", None, ("--set", assigned([*SETTINGS, *more])))


@pytest.fixture(scope="module")
def reports() -> list[TrainingProgress]:
    """Return what ``whole`` reported while it ran."""
    return []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, reports: list[TrainingProgress]) -> Path:
    path = tmp_path_factory.mktemp("runs") / "whole"
    return run_experiment(configuration(), path, on_progress=reports.append)


def assert_same(path: Path, other: Path) -> None:
    a, b = backlight.open_run(path), backlight.open_run(other)
    assert set(a.scalar_names()) == set(b.scalar_names())
    assert a.array_names() == b.array_names()
    for source in ("user", "backlight"):
        for name in a.scalar_names(source):
            x, y = a.scalar(name, source), b.scalar(name, source)
            assert np.array_equal(x.steps, y.steps), name
            assert np.array_equal(x.values, y.values), name
    for name in a.array_names():
        (x_steps, x_values), (y_steps, y_values) = a.array(name), b.array(name)
        assert np.array_equal(x_steps, y_steps), name
        assert all(map(np.array_equal, x_values, y_values)), name


@pytest.mark.slow
def test_run_holds_status_facts_and_series(whole: Path, reports: list[TrainingProgress]) -> None:
    run = backlight.open_run(whole)
    assert run.status is RunStatus.FINISHED
    assert run.losses == ()
    assert run.monitors == ("grokking",)
    (event,) = run.events("grokking")
    facts = event.payload
    assert (facts["experiment"], facts["control"], facts["seed"]) == ("oracle", "", 0)
    assert facts["probe_size"] == 128
    total = summed_influences(run)
    assert total is not None
    drawn = influence(Source(run))
    assert isinstance(drawn, Drawn)
    assert drawn.facts[0].value.startswith(f"{facts['probe_rows'][int(total.argmax())]} (")
    assert facts["chance"] == pytest.approx(1 / 23)
    assert facts["settings"]["training"]["steps"] == 120
    assert run.scalar("train_accuracy", "user").steps.tolist() == list(range(0, 121, 5))
    expected = {"gram/model/trace", "window/trace", "agop/trace", "sketch/model/shrinkage"}
    expected |= {"influence/drop", "influence/held_out_loss", "ntk/alignment", "ntk/distance"}
    assert expected <= set(run.scalar_names())
    assert [one.step for one in reports] == list(range(0, 121, 5))
    assert (reports[0].phase, reports[-1].phase) == ("memorising", "memorised")
    assert reports[-1].values["train_accuracy"] == 1.0


@pytest.mark.slow
def test_stored_gradients_equal_those_of_training(whole: Path) -> None:
    task = runner.build(configuration())
    torch.manual_seed(0)
    run = backlight.open_run(whole)
    found = {name: run.array(f"gradient/{name}") for name, _ in task.model.named_parameters()}
    for step in range(30):
        task.optimizer.zero_grad()
        task.loss(task.model, task.batch(step)).backward()
        if step % 5 == 0:
            for name, parameter in task.model.named_parameters():
                steps, values = found[name]
                assert np.array_equal(values[steps.tolist().index(step)], parameter.grad.numpy()), (
                    step,
                    name,
                )
        task.optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    "signal_number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_killed_run_resumes_to_same_numbers(whole: Path, tmp_path: Path, signal_number: int) -> None:
    path = tmp_path / "killed"
    slow = (
        "import sys, time\n"
        "import backlight.experiments.runner as t\n"
        "step = t.Loop.step\n"
        "t.Loop.step = lambda self, n: (time.sleep(0.005), step(self, n))\n"
        "from backlight.cli.app import main\n"
        "main(sys.argv[1:])\n"
    )
    options = [part for item in SETTINGS for part in ("--set", item)]
    line = [sys.executable, "-c", slow, "grok", "run", "oracle", *options, "--out", str(path)]
    with subprocess.Popen(line, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not list(path.glob("checkpoints/step-00000002*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.03)
        os.kill(process.pid, signal_number)
        code = process.wait()
    assert code == (-signal.SIGKILL if signal_number == signal.SIGKILL else 130)
    before = backlight.open_run(path)
    assert 0 < before.last_step() < 120
    run_experiment(configuration(), path, resume=True)
    after = backlight.open_run(path)
    assert len(after.attempts) == 2
    assert after.attempts[1].step_offset > 0
    assert_same(path, whole)


@pytest.mark.slow
def test_run_without_measures_trains_same_and_can_be_extended(whole: Path, tmp_path: Path) -> None:
    path = run_experiment(configuration("training.steps=75", *OFF), tmp_path / "run")
    run_experiment(configuration(*OFF), path, resume=True)
    a, b = backlight.open_run(path), backlight.open_run(whole)
    assert a.array_names() == ()
    for name in ("train_loss", "test_accuracy"):
        assert np.array_equal(a.scalar(name, "user").values, b.scalar(name, "user").values)


@pytest.mark.slow
def test_refusals_change_no_file(whole: Path, tmp_path: Path) -> None:
    before = sorted(whole.rglob("*"))
    with pytest.raises(ConfigurationError, match=r"another configuration: training.lr is 0.01, was 0.005"):
        run_experiment(configuration("training.lr=0.01"), whole, resume=True)
    with pytest.raises(RunExistsError, match="holds a run already; continue it with --resume"):
        run_experiment(configuration(), whole)
    with pytest.raises(RunExistsError, match="holds no run to resume"):
        run_experiment(configuration(), tmp_path / "none", resume=True)
    with pytest.raises(ConfigurationError, match="these sizes cannot be built"):
        run_experiment(configuration("model.width=1000000000000"), tmp_path / "large")
    with pytest.raises(ConfigurationError, match="device 'nonsense' cannot be used here"):
        run_experiment(configuration("device=nonsense"), tmp_path / "device")
    assert sorted(whole.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_tier_is_recorded_and_resumed(tmp_path: Path) -> None:
    path = run_experiment(
        configuration("training.steps=40"), tmp_path / "run", tier="Gram", reason="no space"
    )
    run = backlight.open_run(path)
    (event,) = run.events("degradation")
    assert event.payload == {
        "from": "full factors", "to": "Gram", "reason": "no space",
        "left_out": ["gradient", "mean_gradient", "gram/*/vectors", "sketch"],
    }  # fmt: skip
    assert "gram/model/matrix" in run.array_names()
    assert not [n for n in run.array_names() if n.startswith("gradient/") or n.endswith("/vectors")]
    assert runner.tier_of(path) == "Gram"
    run_experiment(configuration("training.steps=60"), path, resume=True, tier=runner.tier_of(path))
    assert len(backlight.open_run(path).events("degradation")) == 1


@pytest.mark.slow
def test_full_disk_lowers_tier_and_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_at_30(self: Any, step: int, measures: Measures) -> Measures:
        return at_tier(measures, "scalars") if step >= 30 else measures

    monkeypatch.setattr(runner.DiskGuard, "cheaper_if_full", full_at_30)
    path = run_experiment(configuration("training.steps=60"), tmp_path / "run")
    run = backlight.open_run(path)
    assert run.status is RunStatus.FINISHED
    assert run.array("gradient/embed.weight")[0].tolist() == list(range(0, 30, 5))
    assert run.scalar("gram/model/trace").steps.max() > 30


@pytest.mark.slow
def test_estimate_is_near_measured_cost(whole: Path) -> None:
    found = estimate_of(configuration(), whole.parent / "next", budget=0.1)
    assert [cost.name for cost in found.measured] == MEASURED
    times = {cost.name: cost.times for cost in (*found.training, *found.measured)}
    assert (times["training"], times["gradients"], times["gram"]) == (120, 24, 6)
    disk = sum(p.stat().st_size for p in whole.rglob("*") if p.is_file())
    assert 0.5 < found.disk() / disk < 2
    assert found.seconds() > 0
    assert found.fitting() == TIERS[0]


def test_run_that_does_not_fit_is_refused_or_degraded() -> None:
    measured = (Cost("gradients", 10, 0.1, 1000, 8), Cost("gram", 10, 0.1, 100, 8))
    found = Estimate((Cost("training", 10, 0.1, 0, 0),), measured, 0, 10_000, 5_000, 100, Measures())
    for part in ("11 kB of disk", "10 kB are free", "5 kB must stay free"):
        assert part in found.problem(TIERS[0])
    with pytest.raises(
        DoesNotFitError, match=r"With --degrade it runs with top-k \(left out: gradient, mean_gra"
    ):
        choose(found, degrade=False)
    assert choose(found, degrade=True) == Choice("top-k", found.problem(TIERS[0]))
    assert choose(found, degrade=False, ask=lambda text: "top-k" in text).tier == "top-k"
    with pytest.raises(DoesNotFitError):
        choose(found, degrade=False, ask=lambda _text: False)
    none = dataclasses.replace(found, free_disk=10)
    with pytest.raises(DoesNotFitError, match="does not fit, even with scalars alone"):
        choose(none, degrade=True)
    small = dataclasses.replace(found, free_disk=10**9, free_memory=4)
    assert "8 B more memory are needed and 4 B are available" in small.problem(TIERS[0])
