"""Faulty ranks and launches: the training continues, and one line reports what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import backlight
from backlight.records import RunStatus
from ranks.launching import launched

pytestmark = pytest.mark.full
HERE = Path(__file__).parent
TRAINING = HERE / "training.py"
ONE_RANK_DIFFERS = """
import os, sys, runpy
rank = int(os.environ["RANK"])
script, run = sys.argv[1:3]
sys.argv = [script, *sys.argv[3:]]
if rank == int(os.environ["OTHER"]) and os.environ["HOW"] == "unwatched":
    # Keep a reference: DDP may otherwise deadlock with a gloo thread (torch 2.13).
    namespace = runpy.run_path(script, run_name="__main__")
else:
    import backlight
    other = rank == int(os.environ["OTHER"])
    with backlight.watch(run=run, every=2 if other else 1, monitors=("health",)):
        namespace = runpy.run_path(script, run_name="__main__")
"""


def watched(
    run: Path, *words: object, ranks: int = 2, resume: bool = False, **environment: str
) -> tuple[int, str]:
    options = ["--monitors", "health", "--every", "1", "--out", run, *(["--resume"] if resume else [])]
    line = ("-m", "backlight", "run", *options, TRAINING, *words)
    return launched(ranks, *line, **environment)


def test_missing_and_early_destroyed_process_group(tmp_path: Path) -> None:
    for word in ("idle", "early"):
        code, output = watched(tmp_path / word, 4, word)
        assert code == 0, output
        assert "Your training continues unchanged" not in output  # the usual end of a warning
        run = backlight.open_run(tmp_path / word)
        assert (run.status, run.attempts[0].ranks, run.losses) == (RunStatus.FINISHED, (0, 1), ())
        assert run.frame("gradient", "norm", rank=1).steps.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("other", [0, 2])
def test_rank_without_backlight_is_reported(tmp_path: Path, other: int) -> None:
    script = tmp_path / "some.py"
    script.write_text(ONE_RANK_DIFFERS)
    given = {"OTHER": str(other), "HOW": "unwatched", "BACKLIGHT_JOIN_TIMEOUT": "2"}
    code, output = launched(3, script, TRAINING, tmp_path / "run", 3, **given)
    assert code == 0, output
    if other:
        run = backlight.open_run(tmp_path / "run")
        assert run.losses == (f"attempt 0: rank {other} of 3 left no file",)
    else:
        (part,) = tmp_path.glob("run.part-*")
        run = backlight.open_run(part)
        assert "rank 1 does not see the run of rank 0 and writes a part of it" in output
        assert "attempt 0: rank 0 of 3 left no file" in run.losses
    assert run.attempts[0].ranks == tuple(r for r in range(3) if r != other)
    # DDP replicates parameters, so the remaining rank holds all of them.
    assert run.frame("gradient", "norm").measured.all()


def test_rank_with_different_options_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "some.py"
    script.write_text(ONE_RANK_DIFFERS)
    code, output = launched(2, script, TRAINING, tmp_path / "run", 4, OTHER="1", HOW="watched")
    assert code == 0, output
    run = backlight.open_run(tmp_path / "run")
    assert any("rank 1 did not record what rank 0 did: every 2 instead of 1" in loss for loss in run.losses)
    line = [sys.executable, "-m", "backlight", "findings", str(run.path)]
    shown = subprocess.run(
        line, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "300"}
    )
    assert "rank 1 did not record what rank 0 did: every 2 instead of 1" in shown.stdout + shown.stderr


def test_concurrent_launch_is_rejected_and_a_later_one_resumes_on_request(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    line += ["-m", "backlight", "run", "--monitors", "health", "--every", "1", "--out", str(tmp_path / "run")]
    words = [str(TRAINING), "2", "hang", str(mark)]
    first = subprocess.Popen(
        [*line, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
    )
    try:
        for _ in range(1200):
            if mark.exists():
                break
            assert first.poll() is None
            time.sleep(0.1)
        code, output = watched(tmp_path / "run", 2)
        assert code != 0
        assert "is still being written by process" in output
        assert "(attempt 0); choose another --out" in output
        assert "next: backlight report" not in output  # no data of the other launch
        assert first.poll() is None
        assert backlight.open_run(tmp_path / "run").status is RunStatus.RUNNING
    finally:
        first.terminate()
        first.communicate(timeout=60)
    code, output = watched(tmp_path / "run", 2)
    assert code != 0
    assert "holds a run of" in output
    code, output = watched(tmp_path / "run", 2, resume=True)
    assert code == 0, output
    run = backlight.open_run(tmp_path / "run")
    assert [a.status for a in run.attempts] == [RunStatus.KILLED, RunStatus.FINISHED]
    assert run.frame("gradient", "norm").steps.tolist() == [0, 1, 2, 3]
