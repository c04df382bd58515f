"""Each rule speaks on a injected fault and is silent on its control."""

from __future__ import annotations

from pathlib import Path

import pytest

from backlight.findings.evaluate import evaluate_rules
from backlight.records import Finding, Severity
from backlight.store.read.run import Run
from spectra_runs import STRENGTHS, Injected, write_spectra_run

QKV, UP, HEAD = STRENGTHS


def said(run: Run, rule: str, **limits: float) -> list[Finding]:
    return [f for f in evaluate_rules(run, {"spectra": limits}) if f.rule == rule]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    weak = {name: (2.6,) for name in STRENGTHS}
    plan = Injected(replicates=32, update_ranks=(6.0, 5.5, 5.0), decay=1.0, strengths=weak)
    return write_spectra_run(tmp_path_factory.mktemp("spectra") / "healthy", plan)


@pytest.mark.parametrize(
    "rule", ["below_noise", "batch_far_from_critical", "rank_collapse", "estimator_contradicted"]
)
def test_a_healthy_run_is_left_alone(healthy: Run, rule: str) -> None:
    assert said(healthy, rule) == []


def test_many_replicates_are_enough(tmp_path: Path) -> None:
    plan = Injected(steps=(0,), shapes={HEAD: (20, 36)}, replicates=48)
    assert said(write_spectra_run(tmp_path / "run", plan), "too_few_replicates") == []


def test_layers_of_noise_are_named(tmp_path: Path) -> None:
    run = write_spectra_run(tmp_path / "run", Injected(steps=(0, 10), strengths={UP: (8.0,)}, decay=0.9))
    (found,) = said(run, "below_noise")
    assert found.severity is Severity.WARNING
    assert {e.path for e in found.evidence if e.path.endswith("identifiable")} == {
        f"scalars/spectra/{name}/identifiable" for name in (QKV, HEAD)
    }
    assert all(e.value == 0 for e in found.evidence if e.path.endswith("identifiable"))
    assert "(2 of 3) stands above the noise of one replicate (4 samples) at step 10" in found.detail
    assert "since step 0" in found.detail


def test_one_layer_of_noise_is_a_remark(tmp_path: Path) -> None:
    plan = Injected(steps=(0,), strengths={QKV: (6.0,), UP: (8.0,)})
    (found,) = said(write_spectra_run(tmp_path / "run", plan), "below_noise")
    assert found.severity is Severity.INFO
    assert found.subject.parameter == HEAD


def test_a_batch_far_from_the_noise_scale_is_named(tmp_path: Path) -> None:
    strong = {name: (100.0,) for name in STRENGTHS}
    run = write_spectra_run(tmp_path / "large", Injected(steps=(0,), strengths=strong))
    (found,) = said(run, "batch_far_from_critical")
    scale = run.scalar(f"spectra/{UP}/noise_scale").values[0]
    assert "The batch of 48 samples at step 0" in found.detail
    assert "known well enough" in found.detail
    assert scale < 4.8
    small = write_spectra_run(tmp_path / "small", Injected(steps=(0,), strengths={}, replicates=12))
    (found,) = said(small, "batch_far_from_critical")
    assert "nearly all of each step is noise" in found.detail


def test_the_batch_of_checkpoints_is_nobodys(tmp_path: Path) -> None:
    strong = {name: (100.0,) for name in STRENGTHS}
    run = write_spectra_run(tmp_path / "run", Injected(steps=(0,), strengths=strong, checkpoints=True))
    assert said(run, "batch_far_from_critical") == []


def test_an_update_that_collapses_is_named(tmp_path: Path) -> None:
    run = write_spectra_run(tmp_path / "run", Injected(update_ranks=(8.0, 7.0, 1.1)))
    (found,) = said(run, "rank_collapse")
    assert "has collapsed to stable rank 1.1 at step 200; it was up to 8 before" in found.detail
    assert found.evidence[0].path == f"scalars/spectra/{QKV}/stable_rank_update"
    assert found.evidence[0].value == pytest.approx(1.1)
    always = write_spectra_run(tmp_path / "always", Injected(update_ranks=(1.2, 1.1, 1.1)))
    assert said(always, "rank_collapse") == []
