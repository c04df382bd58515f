"""DeepSpeed's engines, stages 0 to 3 on two ranks, against DDP."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import backlight
from backlight.capture import engines
from backlight.findings.evaluate import findings_of
from backlight.records import Severity
from backlight.store.spectra import left_out
from integrations.torchrun import environment, start
from processes import run_captured

STAGES = (0, 1, 2, 3)
SERIES = (
    ("gradient", "norm"),
    ("gradient", "max_abs"),
    ("update", "update_norm"),
    ("update", "weight_norm"),
)
SCALARS = ("loss", "total_norm", "clip/norm", "clip/limit", "clip/factor", "backwards", "lr/0/0", "lr/0/1")
FLAVOURS = (
    "zero1-module",
    "zero3-optimizer",
    "zero0-fp16",
    "zero1-bf16",
    "zero2-fp16",
    "zero1-offload",
    "zero3-offload",
    "zero2-overflow",
    "zero3-overflow",
    "zero3-nvme",
    *(f"zero{stage}-spectra" for stage in STAGES),
)
FAULTS = ("zero0-drift", *(f"zero{stage}-{kind}" for stage in STAGES for kind in ("cut", "long")))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of one training run of each kind; the first start compiles for a minute."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install deepspeed")
    folder = tmp_path_factory.mktemp("deepspeed")
    pairs = [name for stage in STAGES for name in (f"zero{stage}", f"zero{stage}-plain")]
    start(2, "deepspeed_loop.py", str(folder), "ddp", *pairs, *FLAVOURS, *FAULTS, timeout=900)
    return folder


def results(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"results-{rank}.json").read_text())
    return found


def apart(one: Any, other: Any) -> float:
    """Return the largest relative difference; what only one of both has counts as infinite."""
    one, other = np.asarray(one, float), np.asarray(other, float)
    assert one.shape == other.shape
    assert (np.isnan(one) == np.isnan(other)).all()
    return float(np.nanmax(np.abs(one - other) / (np.abs(other) + 1e-12)))


def compare(run: backlight.Run, control: backlight.Run, tolerance: float) -> None:
    """Assert that two runs measured the same."""
    for series, column in SERIES:
        frame, expected = run.frame(series, column), control.frame(series, column)
        order = [frame.names.index(name) for name in expected.names]
        assert sorted(frame.names) == sorted(expected.names)
        assert frame.measured[:, order].tolist() == expected.measured.tolist()
        values = np.where(expected.measured, frame.values[:, order], 0.0)
        assert apart(values, np.where(expected.measured, expected.values, 0.0)) < tolerance, (series, column)
    for name in SCALARS:
        assert apart(run.scalar(name).values, control.scalar(name).values) < tolerance, name


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_measures_what_ddp_does(runs: Path, stage: int) -> None:
    run, control = backlight.open_run(runs / f"zero{stage}"), backlight.open_run(runs / "ddp")
    compare(run, control, 2e-6)
    shapes = {record.name: record.shape for record in run.parameters()}
    assert shapes == {record.name: record.shape for record in control.parameters()}
    assert [one.rule for one in findings_of(run)] == [one.rule for one in findings_of(control)]


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_watching_leaves_weights_and_random_state_alone(runs: Path, stage: int) -> None:
    for rank in (0, 1):
        found = results(runs, rank)
        assert found[f"zero{stage}"] == found[f"zero{stage}-plain"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["zero1-module", "zero3-optimizer", "zero1-offload", "zero3-offload"])
def test_other_ways_to_watch_and_offloading(runs: Path, name: str) -> None:
    compare(backlight.open_run(runs / name), backlight.open_run(runs / "ddp"), 2e-6)


@pytest.mark.full
@pytest.mark.parametrize(("name", "tolerance"), [("zero1-bf16", 0.1), ("zero2-fp16", 0.02)])
def test_half_precision_is_measured_in_true_size(runs: Path, name: str, tolerance: float) -> None:
    run = backlight.open_run(runs / name)
    compare(run, backlight.open_run(runs / "ddp"), tolerance)
    # The engine's own norm is another algorithm on the same gradients.
    assert apart(run.scalar("total_norm").values, run.scalar("clip/norm").values) < 2e-6


@pytest.mark.full
def test_fp16_at_stage_0_is_measured_as_its_optimizer_uses_it(runs: Path) -> None:
    run, control = backlight.open_run(runs / "zero0-fp16"), backlight.open_run(runs / "ddp")
    scale = run.scalar("scaler/scale").values
    assert (scale == 256).all()
    # The loss is not scaled, but the step divides, so that no norm reaches the limit of clipping.
    first = run.scalar("total_norm").values[:1] * 256  # of equal weights
    assert apart(first, control.scalar("total_norm").values[:1]) < 0.01
    assert apart(run.scalar("clip/norm").values, run.scalar("total_norm").values) < 2e-6
    assert run.scalar("clip/factor").values.tolist() == [1.0] * 6


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_skipped_steps_are_recorded_with_their_scale(runs: Path, stage: int) -> None:
    name = f"zero{stage}-overflow"
    run = backlight.open_run(runs / name)
    skipped = results(runs, 0)[name]["skipped"]
    assert any(skipped)
    assert run.scalar("scaler/skipped").values.tolist() == [float(one) for one in skipped]
    scales = run.scalar("scaler/scale").values
    assert (scales[1:] / scales[:-1])[np.array(skipped[:-1])].tolist() == [0.5] * sum(skipped[:-1])
    assert {one.rule for one in findings_of(run)} <= {"loss_scale", "no_gradient"}


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_spectra_state_one_reason_why_an_engine_leaves_them_out(runs: Path, stage: int) -> None:
    run = backlight.open_run(runs / f"zero{stage}-spectra")
    known, reasons = left_out(run), [event.payload["reason"] for event in run.events("unmeasured")]
    if stage == 0:  # whose replicates are too few
        assert {why for name, why in known.items() if name in {"up.weight", "down.weight"}} == set()
        assert all("needs 3 replicates" in reason for reason in reasons)
        return
    cut = "its engine keeps a part of it on each rank, and no gradient of a single backward"
    assert (known["up.weight"], known["down.weight"], reasons) == (cut, cut, [])
    assert known["frozen.weight"].startswith("frozen")
    assert [one for one in findings_of(run) if one.severity is not Severity.INFO] == []


@pytest.mark.full
def test_gradients_on_nvme_are_not_measured(runs: Path) -> None:
    run = backlight.open_run(runs / "zero3-nvme")
    assert run.last_step() == 5
    assert not [one for one in findings_of(run) if one.severity is not Severity.INFO]
    (event, *_) = run.events("unmeasured")
    assert event.payload["reason"] == engines.NVME
    assert "up.weight" in event.payload["parameters"]


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_a_cut_gradient_is_named_and_its_control_is_silent(runs: Path, stage: int) -> None:
    found = {
        kind: [
            one
            for one in findings_of(backlight.open_run(runs / f"zero{stage}-{kind}"))
            if one.severity is not Severity.INFO
        ]
        for kind in ("cut", "long")
    }
    assert found["long"] == []
    (finding,) = found["cut"]
    assert finding.rule == "no_gradient"
    named = {evidence.path.rpartition("/")[2] for evidence in finding.evidence}
    assert {"up.weight", "up.bias", "norm.weight", "norm.bias"} <= named
    assert "down.weight" not in named


@pytest.mark.full
def test_replicas_that_drift_are_named_at_stage_0(runs: Path) -> None:
    (finding,) = [
        one for one in findings_of(backlight.open_run(runs / "zero0-drift")) if one.severity is Severity.ERROR
    ]
    assert finding.rule == "replicas_differ"
    assert finding.subject.parameter == "down.weight"


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 3])
def test_backlight_run_watches_an_unchanged_script(runs: Path, tmp_path: Path, stage: int) -> None:
    script = Path(__file__).with_name("deepspeed_loop.py")
    name, out = f"zero{stage}-plain", tmp_path / "run"
    run = ("-m", "backlight", "run", "--every", "1", "--out", str(out), str(script), str(tmp_path), name)
    done = run_captured(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *run],
        env=environment(),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compare(backlight.open_run(out), backlight.open_run(runs / "ddp"), 2e-6)
    assert results(tmp_path, 0)[name] == results(runs, 0)[name]


# Without DeepSpeed


class Unknown:
    """An optimizer of a release that keeps gradients elsewhere."""

    def __init__(self) -> None:
        parameter: Any = torch.nn.Parameter(torch.zeros(2))
        parameter._hp_mapping = SimpleNamespace()
        self.optimizer = torch.optim.SGD([parameter], lr=0.1)
        self.bit16_groups = [[parameter]]


def test_an_unknown_release_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = next(iter(engines._OPTIMIZERS.items()))
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: Unknown}))
    outer = Unknown()
    with pytest.warns(RuntimeWarning, match=r"not measured: steps of DeepSpeed's Unknown, after Attribute"):
        assert engines.adapted(outer) is None
    assert engines.adapted(outer) is None


def test_frozen_parameter_that_a_release_keeps_elsewhere_is_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = torch.nn.Linear(2, 2)
    model.weight.ds_id = 0
    monkeypatch.setattr(engines, "_KNOWN", {"an engine": "is there"})
    with pytest.warns(RuntimeWarning, match="frozen parameters of DeepSpeed's Linear, after AttributeError"):
        assert engines.engine_places([model]) == {}
    assert engines.engine_places([model]) == {}


def test_objects_of_others_are_no_engines() -> None:
    assert engines.adapted(torch.optim.SGD([torch.zeros(2)], lr=0.1)) is None
    assert engines.engines([torch.nn.Linear(2, 2)]) == []


def test_a_missing_deepspeed_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.delitem(sys.modules, "backlight.integrations.deepspeed", raising=False)
    with pytest.raises(ImportError, match=r"expected deepspeed 0\.19\.8 or newer, it is not installed"):
        __import__("backlight.integrations.deepspeed")


def test_a_model_is_no_engine() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install deepspeed")
    from backlight.integrations.deepspeed import watch

    with pytest.raises(TypeError, match="got Linear, expected an engine with an optimizer"):
        watch(torch.nn.Linear(2, 2))
