"""Faults on one rank: the training continues unchanged, and the run reports the fault."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backlight.findings.evaluate import evaluate_rules
from backlight.records import Finding, Severity
from backlight.report.panel import PANELS, Drawn
from backlight.report.source import Source
from backlight.store.read.run import Run, open_run
from ranks.launching import HERE, torchrun

DIAGONAL = ("nan_ddp", "skip_shard", "thawed", "healthy_shard", "moved", "experts", "same_ddp")
REST = (
    "healthy", "nan_shard", "skip_ddp", "unreduced", "nan_unreduced", "cut", "seeded", "rates", "corrupted",
    "plain", "local_sgd", "columns", "uneven",
    "same_shard",
)  # fmt: skip
FAULTS = [*DIAGONAL, *(pytest.param(name, marks=pytest.mark.full) for name in REST)]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all faults that the selected tests need, in one launch."""
    made = tmp_path_factory.mktemp("faults")
    every = any(
        item.get_closest_marker("full") for item in request.session.items if item.fspath == request.fspath
    )
    names = [*DIAGONAL, *(REST if every else ()), *(("destroyed",) if every else ())]
    torchrun(2, HERE / "faults.py", made, ",".join(names))
    return made


def found(run: Run, rule: str) -> list[Finding]:
    return [finding for finding in evaluate_rules(run) if finding.rule == rule]


@pytest.mark.parametrize("name", FAULTS)
def test_training_continues_unchanged(name: str, folder: Path) -> None:
    for rank in range(2):
        result: dict[str, Any] = json.loads((folder / f"{name}-{rank}.json").read_text())
        assert result["same"]
        assert not result["warnings"]
        assert result["collectives"][0] == result["collectives"][1]


def test_bad_batch_is_attributed_to_its_rank(folder: Path) -> None:
    run = open_run(folder / "nan_ddp")
    (finding,) = found(run, "non_finite")
    assert (finding.subject.step, finding.subject.rank) == (2, 1)
    assert "scalars/loss, rank 1" in {e.path for e in finding.evidence}
    assert run.spread("loss").first_non_finite() == (2, (1,))
    gradient = run.frame("gradient", "non_finite", rank=0)  # all ranks have it from here on
    assert gradient.values[2].sum() > 0


@pytest.mark.full
def test_nan_in_a_shard_is_counted_once_and_attributed_to_its_rank(folder: Path) -> None:
    run = open_run(folder / "nan_shard")
    frame = run.frame("gradient", "nan")
    assert frame.values[2, frame.names.index("block.up.weight")] == 1
    assert np.isnan(run.frame("gradient", "norm").values[2, frame.names.index("block.up.weight")])
    assert np.isnan(run.scalar("total_norm").values[2])
    (finding,) = found(run, "non_finite")
    assert (finding.subject.step, finding.subject.rank) == (2, 1)


@pytest.mark.full
def test_unreduced_nan_is_attributed_to_its_rank(folder: Path) -> None:
    run = open_run(folder / "nan_unreduced")
    (finding,) = found(run, "non_finite")
    assert (finding.subject.step, finding.subject.rank) == (2, 1)


@pytest.mark.parametrize("name", ["skip_shard", pytest.param("skip_ddp", marks=pytest.mark.full)])
def test_skipped_step_is_reported_and_excluded_from_the_join(name: str, folder: Path) -> None:
    run = open_run(folder / name)
    (finding,) = found(run, "replicas_differ")
    assert finding.severity is Severity.ERROR
    assert (finding.subject.step, finding.subject.rank) == (2, 1)
    assert [e.value for e in finding.evidence] == [4, 3]
    frame = run.frame("gradient", "norm")
    trained = [p for p, name in enumerate(frame.names) if not name.startswith("unused")]
    assert frame.measured[:2, trained].all()
    # Only rank 0 has the last step: whole parameters are measured, shards are not.
    assert not frame.measured[2:5, trained].any()
    assert set(run.scalar("total_norm").steps) == ({0, 1} if name == "skip_shard" else {0, 1, 5})


def test_parameter_ignored_by_ddp_is_reported(folder: Path) -> None:
    run = open_run(folder / "thawed")
    (finding,) = found(run, "replicas_differ")
    assert finding.subject.parameter in {"block.up.weight", "block.up.bias"}
    one, other = (e.value for e in finding.evidence)
    assert one != other
    frame = run.frame("gradient", "norm")
    measured = {name for p, name in enumerate(frame.names) if frame.measured[:, p].any()}
    assert measured == {"embed.weight", "gate", "block.norm.weight", "block.norm.bias"} | {
        "block.down.weight",
        "block.down.bias",
    }


@pytest.mark.parametrize("name", ["same_ddp", pytest.param("same_shard", marks=pytest.mark.full)])
def test_ranks_with_the_same_batches_are_reported(name: str, folder: Path) -> None:
    (finding,) = found(open_run(folder / name), "repeated_data")
    assert finding.severity is Severity.WARNING
    assert finding.title == "All ranks train on the same batches"
    assert (finding.subject.step, finding.subject.rank) == (0, 0)
    assert [(evidence.step, evidence.value) for evidence in finding.evidence] == [(0, 2)]


PARTED = {
    "moved": (1, "weights", "error", "something else wrote its weights"),
    "seeded": (0, "weights", "error", "before the first update"),
    "rates": (1, "weights", "error", r"The learning rate is 0\.02 on rank 0 and 0\.04 on rank 1"),
    "thawed": (0, "gradients", "error", "the other gradients agree"),
    "corrupted": (2, "gradients", "error", "the other gradients agree"),
    "plain": (6, "weights", "warning", "equal until then"),
}
"""First step, what parts first, severity, and what the detail names."""


@pytest.mark.parametrize(
    "name", [name if name in DIAGONAL else pytest.param(name, marks=pytest.mark.full) for name in PARTED]
)
def test_parted_replicas_are_reported_from_their_first_step_on(name: str, folder: Path) -> None:
    (finding,) = found(open_run(folder / name), "replicas_differ")
    step, moment, severity, cause = PARTED[name]
    assert finding.subject.step == step
    assert finding.severity.value == severity
    assert {(e.step, e.unit) for e in finding.evidence} == {(step, moment)}
    assert re.search(cause, finding.detail)
    if name == "moved":
        assert finding.subject.parameter == "unused.weight"


CONTROLS = ("healthy", "local_sgd", "columns", "uneven", "unreduced", "cut")


@pytest.mark.parametrize(
    "name",
    ["healthy_shard", "experts", *(pytest.param(name, marks=pytest.mark.full) for name in CONTROLS)],
)
def test_controls_have_no_finding(name: str, folder: Path) -> None:
    assert not [
        f
        for f in evaluate_rules(open_run(folder / name))
        if f.rule.startswith(("ranks", "replicas", "non_f", "repeated"))
    ]


@pytest.mark.full
def test_early_destroyed_group_loses_no_data(folder: Path) -> None:
    assert {p.name for p in folder.glob("destroyed-*-ended")}
    run = open_run(folder / "destroyed")
    assert run.series_steps("gradient").tolist() == list(range(8))
    assert not run.losses


def test_last_step_of_each_rank_is_recorded(folder: Path) -> None:
    states = open_run(folder / "skip_shard").ranks()
    assert [(s.rank, s.status.value, s.last_step) for s in states] == [(0, "finished", 5), (1, "finished", 4)]


def test_spread_of_a_scalar_over_ranks(folder: Path) -> None:
    run = open_run(folder / "healthy_shard")
    loss, norm = run.spread("loss"), run.spread("total_norm")
    assert loss.ranks == norm.ranks == (0, 1)
    np.testing.assert_allclose(loss.values.mean(axis=1), run.scalar("loss").values)
    np.testing.assert_allclose(np.hypot(*norm.values.T), run.scalar("total_norm").values)
    assert (loss.difference() > 0).all()
    np.testing.assert_allclose(loss.difference(), np.ptp(loss.values, axis=1))
    assert loss.first_non_finite() is None


def test_report_shows_every_rank(folder: Path) -> None:
    drawn = PANELS["ranks"].render(Source(open_run(folder / "nan_ddp")))
    assert isinstance(drawn, Drawn)
    titles = [chart["title"] for chart in drawn.data["charts"]]
    assert titles == ["Loss of each rank", "Norm of what each rank holds", "Time between steps"]
    assert "first loss that is not finite is at step 2, on rank 1" in drawn.remarks[0]
    skipped = PANELS["ranks"].render(Source(open_run(folder / "skip_shard")))
    assert isinstance(skipped, Drawn)
    assert ("rank 1", "finished after step 4") in {(f.label, f.value) for f in skipped.facts}


@pytest.mark.full
def test_tensors_sharing_only_a_name_are_not_joined(folder: Path) -> None:
    run = open_run(folder / "cut")
    frame = run.frame("gradient", "norm")
    assert not frame.measured[:, frame.names.index("weight")].any()
    assert run.frame("gradient", "numel", rank=1).values[0, frame.names.index("weight")] == 8


def test_shard_is_unmeasured_when_a_rank_is_missing(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "healthy_shard", tmp_path / "run")
    for file in (tmp_path / "run").rglob("rank-00001*"):
        file.unlink()
    run = open_run(tmp_path / "run")
    assert any("rank 1 of 2 left no file" in loss for loss in run.losses)
    frame = run.frame("gradient", "norm")
    assert not frame.measured.any()
    assert not len(run.scalar("total_norm").steps)
    trained = frame.names.index("block.up.weight")
    assert frame.incomplete()[:, trained].all()
    assert run.frame("gradient", "norm", rank=0).measured[:, trained].all()
    reasons = Source(run).unmeasured_parameters
    assert "block.up.weight" in reasons["ranks measured gradients that do not make up a whole"]
