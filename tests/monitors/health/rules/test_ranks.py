from pathlib import Path

import pytest

from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.health.model.score import ROUNDING_SHARE
from injected_faults import two_ranks

MEDIAN = 1e-3


@pytest.mark.parametrize(("times", "reported"), [(0.99, False), (1.01, True)])
def test_replicas_differ_beyond_rounding_error(times: float, reported: bool, tmp_path: Path) -> None:
    # A gradient that is zero up to rounding differs between ranks.
    apart = times * ROUNDING_SHARE * MEDIAN
    ranks = [
        {"a.weight": [1e-9 + rank * apart] * 10, "b.weight": [MEDIAN] * 10, "c.weight": [MEDIAN] * 10}
        for rank in (0, 1)
    ]
    run = two_ranks(ranks)(tmp_path / "run")
    found = [finding for finding in evaluate_rules(run) if finding.rule == "replicas_differ"]
    assert [finding.subject.parameter for finding in found] == (["a.weight"] if reported else [])
