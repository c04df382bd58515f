"""``watch`` on the matrix of cases: training is unchanged, and the run is complete."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import backlight
from backlight.capture.hub import HUB
from backlight.capture.loss_graph import SHOWS_HOOKS
from backlight.records import RunStatus
from cases import CASES, STEPS, Case, batches, build, build_with_sgd, ends, loop

VARIANTS = {"adamw_foreach", "float64_weights", "parameter_groups", "clipped_in_two_halves", "scaler"}
"""Cases whose mechanism another case also covers."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.full] if name in VARIANTS else [])
        for name, case in CASES.items()
    ],
)
def test_case(case: Case, tmp_path: Path) -> None:
    alone = case.train()
    with backlight.watch(run=tmp_path / "run", every=1):
        watched = case.train()
    for one, two in zip(alone, watched, strict=True):
        assert torch.equal(one.nan_to_num(), two.nan_to_num())

    run = backlight.open_run(tmp_path / "run")
    assert run.status is RunStatus.FINISHED
    assert run.losses == ()
    frame = run.frame("gradient", "norm")
    assert list(frame.steps) == list(range(case.steps))
    ever = dict(zip(frame.names, frame.measured.any(axis=0), strict=True))
    for name in case.unmeasured:
        assert not ever[name]
    assert sum(ever.values()) >= 1
    assert all(measured for name, measured in ever.items() if name not in case.unmeasured)
    logged = run.scalar_names()
    for scalar in case.scalars:
        assert scalar in logged, f"{scalar} is missing from {logged}"
    for kind in case.events:
        assert run.events(kind), f"no event {kind}: {run.events()}"
    said = [event.payload["what"] for event in run.events("unmeasured")]
    hidden = () if SHOWS_HOOKS else ("uneven_microbatches",)  # of a case with microbatches
    assert tuple(what for what in said if what not in hidden) == case.gaps
    assert set(run.scalar("backwards").values) >= {case.backwards}


@pytest.mark.slow
def test_numbers_equal_those_of_a_manual_loop(tmp_path: Path) -> None:
    model, optimizer = build_with_sgd()
    expected = []
    with backlight.watch(
        model, optimizer, run=tmp_path / "run", every=1, health={"exact_updates": 1}, monitors=("health",)
    ):
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            whole = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
            grads = {n: p.grad.double().clone() for n, p in model.named_parameters()}
            optimizer.step()
            moved = {n: float((p.detach().double() - before[n]).norm()) for n, p in model.named_parameters()}
            weights = {n: float(b.norm()) for n, b in before.items()}
            expected.append((loss.item(), whole.item(), grads, moved, weights))
    run = backlight.open_run(tmp_path / "run")
    names = run.frame("gradient", "norm").names
    for column, of in (("norm", torch.Tensor.norm), ("sum", torch.Tensor.sum), ("mean", torch.Tensor.mean)):
        values = run.frame("gradient", column).values
        for step, (_, _, grads, _, _) in enumerate(expected):
            for p, name in enumerate(names):
                assert values[step, p] == pytest.approx(of(grads[name]).item(), rel=1e-6, abs=1e-9)
    assert run.scalar("loss").values == pytest.approx([e[0] for e in expected], rel=1e-7)
    assert run.scalar("clip/norm").values == pytest.approx([e[1] for e in expected], rel=1e-6)
    assert run.scalar("total_norm").values == pytest.approx([e[1] for e in expected], rel=1e-6)
    assert set(run.scalar("clip/factor").values) == {1.0}
    ratios = run.frame("update", "ratio").values
    for step, (_, _, _, moved, weights) in enumerate(expected):
        for p, name in enumerate(names):
            wanted = np.inf if weights[name] == 0 else moved[name] / weights[name]
            assert ratios[step, p] == pytest.approx(wanted, rel=1e-5)


class ReplacingSGD(torch.optim.SGD):
    """An optimizer that replaces the storage of each parameter instead of updating it in place."""

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


@pytest.mark.slow
def test_optimizer_that_replaces_storage_has_updates(tmp_path: Path) -> None:
    model = build()
    optimizer = ReplacingSGD(model.parameters(), lr=0.1)
    with backlight.watch(
        model, optimizer, run=tmp_path / "run", every=1, health={"exact_updates": 1}, monitors=("health",)
    ):
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    moved = backlight.open_run(tmp_path / "run").frame("update", "update_norm")
    assert moved.measured.all()
    assert (moved.values > 0).all()


@pytest.mark.slow
def test_user_values_are_stored_and_the_model_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [__file__])
    model, optimizer = build_with_sgd()
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1) as watch:
        for number, (x, y) in enumerate(batches(STEPS)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            watch.log(train_accuracy=number / 10, test_loss=torch.tensor(2.0), step=100 + number)
        with pytest.raises(TypeError, match=r"watch.log: text: expected a number"):
            watch.log(text="no")
    with pytest.raises(RuntimeError, match="this watch has ended"):
        watch.log(train_accuracy=1.0)
    run = backlight.open_run(tmp_path / "run")
    assert list(run.scalar("train_accuracy", source="user").values) == [0.0, 0.1, 0.2, 0.3]
    assert list(run.scalar("train_accuracy", source="user").steps) == [0, 1, 2, 3]
    assert list(run.scalar("step", source="user").values) == [100, 101, 102, 103]
    assert set(run.scalar("test_loss", source="user").values) == {2.0}
    with pytest.raises(KeyError, match="it is recorded with source='user'"):
        run.scalar("train_accuracy")
    fingerprint = run.fingerprint()
    assert fingerprint.parameter_count == sum(p.numel() for p in model.parameters())
    assert ("first", "Linear") in fingerprint.modules
    assert fingerprint.optimizers == ("SGD",)
    assert fingerprint.hyperparameters["SGD.momentum"] == str(optimizer.defaults["momentum"])
    assert "SGD.lr" not in fingerprint.hyperparameters
    assert fingerprint.script_hash == hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    assert fingerprint.versions["torch"] == torch.__version__
    assert len(fingerprint.module_hash) == 16
    json.dumps(fingerprint.flags)
    assert not model._forward_hooks
    assert not model._backward_hooks
    assert all(p._backward_hooks is None for p in model.parameters())
    assert len(ends(model)) == len(model.state_dict())


LIBRARIES = ["/usr/lib/python3/site-packages/ray/worker.py", str(Path(sys.executable).with_name("pytest"))]


@pytest.mark.slow
@pytest.mark.parametrize("path", [*LIBRARIES, "/home/me/train.py"])
def test_the_script_of_a_process_that_a_library_started_is_the_users_file(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [path, "--number=1"])
    model, optimizer = build_with_sgd()
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1):
        loop(model, optimizer, steps=1)
    found = backlight.open_run(tmp_path / "run").fingerprint()
    expected = (__file__, ()) if path in LIBRARIES else (path, ("--number=1",))
    assert (found.script, found.arguments) == expected


@pytest.mark.slow
def test_reentry_nesting_and_exceptions(tmp_path: Path) -> None:
    outer = backlight.watch(run=tmp_path / "outer", every=1)
    with outer, outer:
        with pytest.raises(ArithmeticError, match="mine"), backlight.watch(run=tmp_path / "inner", every=1):
            CASES["plain"].train()
            raise ArithmeticError("mine")
        CASES["plain"].train()
        assert HUB.active
    assert not HUB.active
    assert outer.step == 2 * STEPS
    inner = backlight.open_run(tmp_path / "inner")
    assert inner.status is RunStatus.FAILED
    assert inner.events("exception")[0].payload["message"] == "mine"
    assert len(inner.series_steps("gradient")) == STEPS
    assert backlight.open_run(tmp_path / "outer").status is RunStatus.FINISHED


@pytest.mark.slow
def test_second_watch_is_a_new_attempt(tmp_path: Path) -> None:
    watch = backlight.watch(run=tmp_path / "run", every=1, monitors=("health",))
    for _ in range(2):
        with watch:
            CASES["plain"].train()
    run = backlight.open_run(tmp_path / "run")
    assert [a.index for a in run.attempts] == [0, 1]
    assert list(run.series_steps("gradient")) == list(range(2 * STEPS))


@pytest.mark.slow
def test_every_and_steps(tmp_path: Path) -> None:
    model, optimizer = build_with_sgd()
    with (
        pytest.raises(SystemExit) as leaving,
        backlight.watch(model, optimizer, run=tmp_path / "run", every=3, steps=7, monitors=("health",)),
    ):
        loop(model, optimizer, steps=100)
    assert leaving.value.code == 0
    run = backlight.open_run(tmp_path / "run")
    assert list(run.series_steps("gradient")) == [0, 3, 6]
    assert run.status is RunStatus.FINISHED
    # A run of exactly the requested steps ends by itself.
    with backlight.watch(model, optimizer, run=tmp_path / "exact", every=1, steps=4, monitors=("health",)):
        loop(model, optimizer, steps=4)
    assert list(backlight.open_run(tmp_path / "exact").series_steps("gradient")) == [0, 1, 2, 3]


@pytest.mark.slow
def test_internal_error_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = CASES["plain"].train()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr("backlight.monitors.health.monitor.statistics", lambda *_a, **_k: broken())
    with pytest.warns(
        RuntimeWarning,
        match="not measured: gradient statistics from here on, after ZeroDivisionError: injected",
    ) as caught:
        with backlight.watch(run=tmp_path / "run", every=1):
            watched = CASES["plain"].train()
    assert len(caught) == 1
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert (
        "ZeroDivisionError" in backlight.open_run(tmp_path / "run").events("unmeasured")[0].payload["reason"]
    )


def test_failed_start_leaves_the_training_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = CASES["plain"].train()
    listeners = len(HUB.listeners)

    def broken(*_a: object, **_k: object) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr("backlight.session.writer_thread.WriterThread.start", broken)
    message = "not measured: this training, which is not watched, after ZeroDivisionError: injected"
    with pytest.warns(RuntimeWarning, match=message) as warned:
        with backlight.watch(run=tmp_path / "run", every=1) as watch:
            watched = CASES["plain"].train()
            watch.log(accuracy=1.0)
            assert (watch.step, watch.findings) == (0, [])
    assert len(warned) == 1
    assert len(HUB.listeners) == listeners
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    run = backlight.open_run(tmp_path / "run")
    assert run.status == "failed"
    assert "ZeroDivisionError" in run.events("unmeasured")[0].payload["reason"]


@pytest.mark.slow
def test_warnings_as_errors_do_not_end_a_watched_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("backlight.monitors.health.monitor.statistics", lambda *_a, **_k: 1 / 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with backlight.watch(run=tmp_path / "run", every=1):
            CASES["plain"].train()
    assert (
        "not measured: gradient statistics from here on, after ZeroDivisionError" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_deleted_run_directory_is_one_warning(tmp_path: Path) -> None:
    import shutil

    model, optimizer = build_with_sgd()
    with pytest.warns(RuntimeWarning, match="can no longer be written") as caught:
        with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, flush_interval=0.05) as watch:
            loop(model, optimizer)
            assert watch.findings == []
            # Rename first: the writer thread may create a file while rmtree runs.
            (tmp_path / "run").rename(tmp_path / "gone")
            shutil.rmtree(tmp_path / "gone")
            loop(model, optimizer)
            loop(model, optimizer)
    assert len(caught) == 1


@pytest.mark.slow
def test_finding_triggers_detail(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def inject_nan(model: torch.nn.Module) -> None:
        if watch.step == 8:
            model.first.weight.grad[0, 0] = float("nan")

    with backlight.watch(
        model, optimizer, run=tmp_path / "run", every=8, detail=5, monitors=("health",)
    ) as watch:
        initial = copy.deepcopy(model.state_dict())
        for number in range(10):
            loop(model, optimizer, inject_nan, steps=1)
            model.load_state_dict(initial)
            assert any(f.rule == "non_finite" for f in watch.findings) == (number >= 8)
        loop(model, optimizer, steps=20)
    run = backlight.open_run(tmp_path / "run")
    assert [e.payload["cause"] for e in run.events("detail")] == ["non_finite"]
    assert list(run.series_steps("gradient")) == [0, 8, 10, 11, 12, 13, 14, 16, 24, 29]
    assert list(run.series_steps("histogram")) == [10, 11, 12, 13, 14]
    live = {f.rule: f for f in run.stored_findings()}
    assert live["non_finite"].made == "live"
    assert live["non_finite"].subject.parameter == "first.weight"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"monitors": "health,kitchen"},
            "no monitor is called 'kitchen'; expected some of: activations, correctness, grokking, health",
        ),
        ({"every": 0}, "every: 0: expected 1 or more"),
        ({"every": "often"}, r"every: expected int \| null, got 'often'"),
        ({"thresholds": {"health": {"vanishing": 1}}}, "vanishing"),
        ({"thresholds": {"kitchen": {"hot": 1}}}, "no monitor of that name has thresholds"),
        ({"monitors": ()}, "monitors: expected at least one name"),
    ],
)
def test_invalid_settings_are_rejected_before_any_write(
    settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        backlight.watch(run=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_watch_that_sees_nothing_says_so(tmp_path: Path) -> None:
    with backlight.watch(run=tmp_path / "nothing", monitors=("health",)):
        pass
    (event,) = backlight.open_run(tmp_path / "nothing").events("unmeasured")
    assert event.payload["reason"] == "neither a backward pass nor an optimizer step was seen"


@pytest.mark.slow
def test_accumulated_step_records_the_sum_of_its_losses(tmp_path: Path) -> None:
    model, optimizer = build_with_sgd()
    sums, losses = [], []
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, monitors=("health",)):
        for i, (x, y) in enumerate(batches(6)):
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            losses.append(loss.item())
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
                sums.append(sum(losses[-3:]))
    assert backlight.open_run(tmp_path / "run").scalar("loss").values.tolist() == sums


@pytest.mark.slow
def test_groups(tmp_path: Path) -> None:
    model, optimizer = build_with_sgd()
    with pytest.raises(ValueError, match="'frist' matches none of 6 parameters; did you mean 'first'"):
        backlight.watch(model, optimizer, run=tmp_path / "run", groups={"host": "frist"})
    assert not (tmp_path / "run").exists()
    with pytest.warns(RuntimeWarning, match="the group 'host' is not measured: .* did you mean 'first'"):
        with backlight.watch(run=tmp_path / "run", groups={"host": "frist", "head": "last"}):
            loop(model, optimizer)
    run = backlight.open_run(tmp_path / "run")
    assert run.groups == {"host": "frist", "head": "last"}
    assert [e.payload["what"] for e in run.events("unmeasured")] == ["group host"]


def test_invalid_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"optimizer is Linear, expected torch\.optim\.Optimizer"):
        backlight.watch(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))


def test_foreign_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(b"mine")
    with pytest.raises(Exception, match="is not a backlight run"), backlight.watch(run=tmp_path):
        pass
    assert not HUB.active
    assert [p.name for p in tmp_path.iterdir()] == ["photo.png"]


@pytest.mark.slow
def test_per_backward(tmp_path: Path) -> None:
    with backlight.watch(run=tmp_path / "run", every=1, health={"per_backward": True}, monitors=("health",)):
        CASES["accumulation"].train()
    run = backlight.open_run(tmp_path / "run")
    whole = run.frame("gradient", "norm")
    first, second = (run.frame("gradient", "norm", part=n) for n in (1, 2))
    assert list(whole.steps) == list(first.steps) == list(second.steps) == [0, 1]
    assert np.array_equal(second.values, whole.values)
    assert not np.allclose(first.values, whole.values)
