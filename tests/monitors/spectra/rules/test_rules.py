"""Each rule reports an injected fault and not its control."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.spectra.rules.batch_far_from_critical import batch_to_noise_scale
from backlight.monitors.spectra.rules.rank_collapse import RankCollapseLimits, collapse_bound
from backlight.records import Finding, Severity
from backlight.store.read.run import Run
from spectra_runs import STRENGTHS, Injected, write_spectra_run

QKV, UP, HEAD = STRENGTHS


def findings(run: Run, rule: str, **limits: float) -> list[Finding]:
    return [f for f in evaluate_rules(run, {"spectra": limits}) if f.rule == rule]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    weak = {name: (2.6,) for name in STRENGTHS}
    plan = Injected(replicates=32, update_ranks=(6.0, 5.5, 5.0), decay=1.0, strengths=weak)
    return write_spectra_run(tmp_path_factory.mktemp("spectra") / "healthy", plan)


@pytest.mark.parametrize("rule", ["below_noise", "batch_far_from_critical", "rank_collapse"])
def test_healthy_run_has_no_finding(healthy: Run, rule: str) -> None:
    assert findings(healthy, rule) == []


def test_layers_of_noise_are_reported(tmp_path: Path) -> None:
    run = write_spectra_run(tmp_path / "run", Injected(steps=(0, 10), strengths={UP: (8.0,)}, decay=0.9))
    (found,) = findings(run, "below_noise")
    assert found.severity is Severity.WARNING
    assert {e.path for e in found.evidence if e.path.endswith("identifiable")} == {
        f"scalars/spectra/{name}/identifiable" for name in (QKV, HEAD)
    }
    assert all(e.value == 0 for e in found.evidence if e.path.endswith("identifiable"))
    assert found.subject.step == 10


def test_one_layer_of_noise_is_info(tmp_path: Path) -> None:
    plan = Injected(steps=(0,), strengths={QKV: (6.0,), UP: (8.0,)})
    (found,) = findings(write_spectra_run(tmp_path / "run", plan), "below_noise")
    assert found.severity is Severity.INFO
    assert found.subject.parameter == HEAD


def test_batch_far_from_noise_scale_is_reported(tmp_path: Path) -> None:
    strong = {name: (100.0,) for name in STRENGTHS}
    run = write_spectra_run(tmp_path / "large", Injected(steps=(0,), strengths=strong))
    (found,) = findings(run, "batch_far_from_critical")
    scale = run.scalar(f"spectra/{UP}/noise_scale").values[0]
    assert (found.severity, found.subject.step) == (Severity.INFO, 0)
    assert scale < 4.8
    small = write_spectra_run(tmp_path / "small", Injected(steps=(0,), strengths={}, replicates=12))
    (found,) = findings(small, "batch_far_from_critical")
    assert "far below" in found.title


def test_replicates_of_checkpoints_are_no_batch(tmp_path: Path) -> None:
    strong = {name: (100.0,) for name in STRENGTHS}
    run = write_spectra_run(tmp_path / "run", Injected(steps=(0,), strengths=strong, checkpoints=True))
    assert findings(run, "batch_far_from_critical") == []


def test_collapsed_update_is_reported(tmp_path: Path) -> None:
    run = write_spectra_run(tmp_path / "run", Injected(update_ranks=(8.0, 7.0, 1.1)))
    (found,) = findings(run, "rank_collapse")
    assert (found.severity, found.subject.parameter, found.subject.step) == (Severity.WARNING, QKV, 200)
    assert found.evidence[0].path == f"scalars/spectra/{QKV}/stable_rank_update"
    assert found.evidence[0].value == pytest.approx(1.1)
    always = write_spectra_run(tmp_path / "always", Injected(update_ranks=(1.2, 1.1, 1.1)))
    assert findings(always, "rank_collapse") == []


@pytest.mark.parametrize(
    ("batch", "scale", "expected"),
    [(1000, 99, 1000 / 99), (8, math.inf, 0.0), (8, 0.0, math.inf), (8, math.nan, None), (math.nan, 8, None)],
)
def test_ratio_of_batch_to_noise_scale(batch: float, scale: float, expected: float | None) -> None:
    assert batch_to_noise_scale(batch, scale) == expected


@pytest.mark.parametrize(
    ("rank", "earlier", "collapsed"),
    [
        (1.1, [20, 30, 25], True),
        (1.1, [1.2, 1.3], False),
        (5.0, [40.0], False),
        (1.1, [], False),
        (math.nan, [20], False),
        (1.1, [math.nan], False),
    ],
)
def test_collapse_of_rank(rank: float, earlier: list[float], collapsed: bool) -> None:
    assert (collapse_bound(rank, earlier, RankCollapseLimits()) is not None) == collapsed
