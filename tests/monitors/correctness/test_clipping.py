"""Rule ``clipping`` over ranks: each clips its shard by the norm of its shard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from backlight.findings.evaluate import evaluate_rules
from backlight.records import Finding, Layout, ParameterRecord, Placement
from backlight.store.read.run import open_run
from run_builder import fill, gradient_row, open_ranks, parameter

STEPS = 5


def of_shards(
    path: Path, used: Sequence[Sequence[float]], own: Sequence[Sequence[float]], layout: Layout = Layout.SHARD
) -> list[Finding]:
    """Return the findings on a run whose ranks clip by ``used``, and have gradients of the norm ``own``."""
    placement = Placement(layout, (16, 8), (8, 8), (0, 0), replicas=1)
    table: list[ParameterRecord] = [parameter("a.weight", placement=placement)]
    for writer, norms, of_part in reversed(
        list(zip(open_ranks(path, monitors=("health", "correctness")), used, own, strict=True))
    ):
        fill(
            writer,
            table=table,
            series={"gradient": {step: gradient_row(table, norm) for step, norm in enumerate(of_part)}},
            scalars={"clip/norm": norms, "total_norm": of_part},
        )
        writer.close()
    return [finding for finding in evaluate_rules(open_run(path)) if finding.rule == "clipping"]


OWN = [1.0] * STEPS, [2.0] * STEPS


def test_each_rank_clips_by_the_norm_of_its_shard(tmp_path: Path) -> None:
    (finding,) = of_shards(tmp_path / "run", OWN, OWN)
    assert finding.title == "Each rank clips its shard by the norm of its shard"
    assert (finding.subject.step, finding.subject.rank) == (0, 1)
    assert "1 on rank 0 and 2 on rank 1" in finding.detail


@pytest.mark.parametrize(
    ("used", "own", "layout"),
    [
        ([[5**0.5] * STEPS] * 2, OWN, Layout.SHARD),
        ([[1.0] * STEPS] * 2, ([1.0] * STEPS, [1.002] * STEPS), Layout.SHARD),
        (OWN, OWN, Layout.WHOLE),
        ([[1.0, 1.0], [2.0, 2.0]], [[1.0, 1.0], [2.0, 2.0]], Layout.SHARD),
        ([[3.0] * STEPS, [4.0] * STEPS], OWN, Layout.SHARD),
    ],
    ids=["whole norm", "equal parts", "each rank a model of its own", "two steps", "other norms"],
)
def test_controls(
    used: Sequence[Sequence[float]], own: Sequence[Sequence[float]], layout: Layout, tmp_path: Path
) -> None:
    assert of_shards(tmp_path / "run", used, own, layout) == []
