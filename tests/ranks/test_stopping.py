"""``--stop-on`` under torchrun: all ranks stop before the same step, and may use collectives to save."""

from __future__ import annotations

from pathlib import Path

import pytest

from backlight.records import RunStatus
from backlight.session.stop import CHECK_STEPS
from backlight.store.read.run import open_run
from ranks.launching import HERE, launched


@pytest.mark.parametrize("how", ["interrupt", pytest.param("handler", marks=pytest.mark.full)])
def test_all_ranks_save_behind_a_barrier(how: str, tmp_path: Path) -> None:
    status, errors = launched(
        2, "-m", "backlight", "run", "--out", tmp_path / "run", "--stop-on", "non_finite",
        HERE / "stopping.py", tmp_path, how,
    )  # fmt: skip
    assert status == 1, errors[-3000:]  # torchrun's own
    assert "exitcode: 79" in errors
    steps = {path.name: int(path.read_text()) for path in tmp_path.glob("rank-*")}
    assert set(steps) == {f"rank-0-{how}", f"rank-1-{how}"}
    (step,) = set(steps.values())
    assert step % CHECK_STEPS == 0
    assert errors.count("backlight: stopping after ") == 1
    assert "next: backlight report" in errors  # rank 0 has come to its end
    run = open_run(tmp_path / "run")
    assert run.status is RunStatus.FAILED
    assert {(event.rank, event.step) for event in run.events("stopped")} == {(0, step), (1, step)}
