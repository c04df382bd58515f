"""Faults in a run with the spectra monitor: one warning, an event, unchanged training."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backlight
from backlight.monitors.spectra.instrument import replicate_buffer
from backlight.monitors.spectra.instrument.layer_selection import LayerSelection
from backlight.monitors.spectra.instrument.worker_thread import StepMeasurement
from backlight.store import spectra as stored
from spectra.training import (
    batch,
    build,
    loss_of,
    same,
    scaler,
    train,
    train_once,
    unmeasured,
    watch,
    weights,
)


def corrupt(kind: str) -> Callable[[nn.Module], dict[str, Any]]:
    def of(model: nn.Module) -> dict[str, Any]:
        calls = [0]

        def corrupted(gradient: Tensor) -> Tensor:
            calls[0] += 1
            factor = {"nan": float("nan"), "zero": 0.0}[kind]
            return gradient * factor if calls[0] % 4 == 2 or kind == "zero" else gradient

        model.get_parameter("block.up.weight").register_hook(corrupted)
        return {}

    return of


def without_gradient_once(model: nn.Module) -> dict[str, Any]:
    used = model.block.up

    def before(_step: int, micro: int) -> None:
        used.weight.requires_grad_(micro != 1)

    return {"before": before}


FAULTS: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], str, bool]] = {
    "nan": (corrupt("nan"), "holds NaN or infinite values", False),
    "zero": (corrupt("zero"), "all 4 replicates are zero", False),
    "few": (lambda _m: {"micro": 2}, "2 microbatches give no echo", True),
    "sizes": (lambda _m: {"size": lambda _s, m: 8 - m % 2}, "microbatches of 7, 8 samples", True),
    "no gradient": (without_gradient_once, "no gradient in 1 of 4 microbatches", False),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_one_warning_and_event(fault: str, tmp_path: Path) -> None:
    prepare, reason, everything = FAULTS[fault]
    plain_model, model = build(), build()
    plain = train_once(plain_model, prepare(plain_model))
    with pytest.warns(RuntimeWarning, match=reason) as warned:
        found = train_once(model, prepare(model), tmp_path)
    assert len(warned) == 1
    assert all(torch.equal(plain[n].nan_to_num(3.0), found[n].nan_to_num(3.0)) for n in plain)
    messages = [s for r, s in unmeasured(tmp_path).items() if reason in r]
    assert sorted({step for steps in messages for step in steps if step is not None}) == [0, 2]
    names = {m.parameter for m in stored.measurements(backlight.open_run(tmp_path)) if m.step == 0}
    assert "block.up.weight" not in names
    assert bool(names) is not everything


@pytest.mark.slow
def test_same_data_twice_are_reported(tmp_path: Path) -> None:
    model = build().eval()
    with pytest.warns(RuntimeWarning, match=r"replicates \d and \d are the same"):
        train_once(model, {"number": lambda step, micro: 100 * step + micro // 2}, tmp_path)
    assert not stored.measurements(backlight.open_run(tmp_path))


@pytest.mark.slow
def test_step_that_scaler_skips_is_not_measured(tmp_path: Path) -> None:
    states = []
    for path in (None, tmp_path):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        calls = [0]

        def overflow(gradient: Tensor, calls: list[int] = calls) -> Tensor:
            calls[0] += 1
            return gradient * float("inf") if calls[0] == 1 else gradient

        model.head.weight.register_hook(overflow)
        if path is None:
            train(model, optimizer, scaler=scaler())
        else:
            with (
                pytest.warns(RuntimeWarning, match="the gradient scaler skipped the step"),
                watch(model, optimizer, path, every=2),
            ):
                train(model, optimizer, scaler=scaler())
        states.append(weights(model))
    assert same(*states)
    assert {m.step for m in stored.measurements(backlight.open_run(tmp_path))} == {2}


def test_closures_and_autograd_grad_are_reported_as_unmeasured(tmp_path: Path) -> None:
    model = build()
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = loss_of(model, batch(0))
        loss.backward()
        return loss

    with (
        pytest.warns(RuntimeWarning, match="evaluates a closure several times"),
        watch(model, lbfgs, tmp_path / "closure"),
    ):
        lbfgs.step(closure)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(RuntimeWarning, match="no backward gave gradients"),
        watch(model, sgd, tmp_path / "grad"),
    ):
        parameters = list(model.parameters())
        found = torch.autograd.grad(loss_of(model, batch(0)), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        sgd.step()


@pytest.mark.slow
def test_backward_that_raises_leaves_no_replicate(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise ValueError("injected")

    with watch(model, optimizer, tmp_path):
        for micro in range(5):
            tokens, targets = batch(micro)
            hidden = model.block(model.embed(tokens))
            hidden = Failing.apply(hidden) if micro == 2 else hidden
            loss = nn.functional.cross_entropy(model.head(hidden).flatten(0, 1), targets.flatten())
            if micro == 2:
                with pytest.raises(ValueError, match="injected"):
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
    run = backlight.open_run(tmp_path)
    assert stored.measurements(run, "head.weight")[0].replicates == 4
    assert run.events("spectra_backward_failed")[0].payload["backwards"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["copied", "StepMeasurement.measure", "ReplicateBuffer.end"])
def test_internal_error_is_one_warning(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("injected trouble")

    target = {
        "copied": replicate_buffer,
        "StepMeasurement.measure": StepMeasurement,
        "ReplicateBuffer.end": replicate_buffer.ReplicateBuffer,
    }[method]
    monkeypatch.setattr(target, method.rpartition(".")[2], fail)
    plain = train_once(build(), {})
    with pytest.warns(RuntimeWarning, match="injected trouble") as warned:
        assert same(plain, train_once(build(), {}, tmp_path))
    assert len(warned) <= 2  # the two measured steps are reported separately where the thread failed
    assert any("injected trouble" in reason for reason in unmeasured(tmp_path))


@pytest.mark.slow
def test_error_of_this_monitor_disables_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("injected trouble")

    monkeypatch.setattr(LayerSelection, "momentum", fail)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(
            RuntimeWarning, match="not measured: spectra .*RuntimeError: injected trouble"
        ) as warned,
        backlight.watch(model, optimizer, run=tmp_path, monitors=("health", "spectra"), every=1),
    ):
        train(model, optimizer)
    assert len(warned) == 1
    run = backlight.open_run(tmp_path)
    assert run.scalar("total_norm").steps.tolist() == [0, 1, 2]
    assert not stored.measurements(run)


@pytest.mark.slow
def test_steps_beyond_backlog_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    original = StepMeasurement.measure

    def slow(self: Any, *args: Any) -> Any:
        go.wait(20)
        return original(self, *args)

    monkeypatch.setattr(StepMeasurement, "measure", slow)
    monkeypatch.setattr("backlight.monitors.spectra.instrument.worker_thread.MAX_BACKLOG_STEPS", 1)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tmp_path):
        train(model, optimizer, steps=3)
        go.set()
    assert {m.step for m in stored.measurements(backlight.open_run(tmp_path))} == {0}
    messages = [s for r, s in unmeasured(tmp_path).items() if "take a larger `every`" in r]
    assert messages == [[1, 2]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spectra": {"split": 4}}, r"spectra.split=4 needs samples=\(loss_fn, batch\)"),
        ({"spectra": {"split": 2}}, "spectra.split: 2: expected 0, or 3 and more"),
        ({"spectra": {"include": ["nothing.*"]}}, "spectra.include 'nothing.*' matches none of 5 matrices"),
        ({"spectra": {"includ": []}}, "unknown key 'includ'; did you mean 'include'"),
        ({"spectra": {"buffer": "disk"}}, "spectra.buffer: 'disk': expected one of host, device"),
        ({"spectra": {"memory": 0}}, "spectra.memory: 0: expected 1 or more"),
        ({"spectra": {"states": ["weight"]}}, "spectra.states: 'weight' is unknown"),
        ({"spectra": {"fused": {"head.weight": ["a"]}}}, "needs two or more parts"),
        ({"spectra": {"fused": {"head.weight": list("abcde")}}}, "cannot be divided into 5 equal parts"),
        ({"spectra": {"exchange": True, "ranks": "each"}}, "spectra.exchange: is for ranks that hold"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        backlight.watch(model, optimizer, run=tmp_path / "run", monitors=("spectra",), **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_warnings_as_errors_do_not_end_training(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = train_once(build(), {"micro": 1})
        assert same(plain, train_once(build(), {"micro": 1}, tmp_path))
