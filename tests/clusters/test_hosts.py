"""The batch script on two simulated hosts: shared directory, network storage, no shared directory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import backlight
from backlight.records import RunStatus
from clusters.hosts import pair, refusal
from clusters.slurm import run_batch

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(refusal()), reason=f"no hosts can be made: {refusal()}"),
]
TRAINING = Path(__file__).parent / "training.py"
ON_NETWORK = """
from backlight.store import filesystem
filesystem.on_network = lambda path: True
"""
"""A ``sitecustomize`` module that makes every directory count as network storage."""


def script(folder: Path, out: str, *words: str) -> Path:
    line = [sys.executable, "-m", "backlight", "run", "--slurm", "nodes=2", "--slurm", "nproc_per_node=2"]
    line += ["--monitors", "health", "--every", "1", "--out", out, "--slurm-script", "job.sh"]
    subprocess.run([*line, str(TRAINING), *words], cwd=folder, check=True, capture_output=True)
    return folder / "job.sh"


def hosts_of(run: Path, attempt: int = 0) -> dict[int, str]:
    """Return the host that each rank recorded."""
    documents = sorted((run / f"attempt-{attempt:03d}").glob("rank-*.json"))
    ranks = [json.loads(path.read_text()) for path in documents]
    first = json.loads((run / "manifest.json").read_text())["attempts"][attempt]["progress"]
    return {r["rank"]: (r["progress"] or first)["process"]["host"] for r in ranks}


def test_two_hosts_write_one_run_and_a_requeue_continues_it(tmp_path: Path) -> None:
    job = script(tmp_path, "run", "3")
    with pair(tmp_path) as hosts:
        for restart in range(2):
            code, output = run_batch(job, hosts, tmp_path, restart=restart)
            assert code == 0, output
    run = backlight.open_run(tmp_path / "run")
    assert (run.run_id, run.losses) == ("slurm-77+0", ())
    assert [(a.status, a.step_offset, a.ranks) for a in run.attempts] == [
        (RunStatus.FINISHED, 0, (0, 1, 2, 3)),
        (RunStatus.FINISHED, 3, (0, 1, 2, 3)),
    ]
    assert sorted(hosts_of(run.path).values()) == ["node0", "node0", "node1", "node1"]
    assert run.frame("gradient", "norm").steps.tolist() == list(range(6))


def test_segments_are_renamed_into_place_without_locks(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    of_all = (Path(__file__).parents[1] / "exits" / "sitecustomize.py").read_text()
    (tmp_path / "site" / "sitecustomize.py").write_text(ON_NETWORK + of_all)
    job = script(tmp_path, "run", "3")
    with pair(tmp_path) as hosts:
        code, output = run_batch(job, hosts, tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert code == 0, output
    names = sorted(p.name for p in (tmp_path / "run" / "attempt-000").iterdir() if p.suffix != ".json")
    assert names == [f"rank-{rank:05d}.000000.db" for rank in range(4)]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["attempt-000", "manifest.json"]
    run = backlight.open_run(tmp_path / "run")
    assert (run.attempts[0].ranks, run.losses) == ((0, 1, 2, 3), ())
    assert run.frame("gradient", "norm").steps.tolist() == [0, 1, 2]


def test_hosts_without_shared_storage_write_joinable_parts(tmp_path: Path) -> None:
    job = script(tmp_path, "runs/run", "3")
    with pair(tmp_path, own=tmp_path / "runs") as hosts:
        code, output = run_batch(job, hosts, tmp_path, BACKLIGHT_JOIN_TIMEOUT="1")
        stores = [host.storage(tmp_path / "runs") for host in hosts]
    assert code == 0, output
    with_first = [store for store in stores if (store / "run" / "manifest.json").exists()]
    assert len(with_first) == 1
    run, (other,) = with_first[0] / "run", [store for store in stores if store not in with_first]
    (part,) = other.glob("run.part-node*")
    warned = re.findall(r"rank (\d) does not see the run of rank 0 and writes a part of it", output)
    remote = sorted(int(rank) for rank in warned)
    main_run, part_run = backlight.open_run(run), backlight.open_run(part)
    assert list(part_run.attempts[0].ranks) == remote
    assert len(remote) == 2
    assert sorted(set(range(4)) - set(remote)) == list(main_run.attempts[0].ranks)
    assert any("add it there with `backlight join RUN PART`" in loss for loss in part_run.losses)
    assert any(f"rank {remote[0]} of 4 left no file" in loss for loss in main_run.losses)
    line = [sys.executable, "-m", "backlight", "join", str(run), str(part)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"attempt 0: ranks {remote[0]}, {remote[1]}" in done.stdout
    joined = backlight.open_run(run)
    assert (joined.attempts[0].ranks, joined.losses) == ((0, 1, 2, 3), ())
    for rank in remote:
        mine, before = (r.frame("gradient", "norm", rank=rank) for r in (joined, part_run))
        assert np.array_equal(mine.values, before.values)
    again = subprocess.run(line, capture_output=True, text=True, check=True)
    assert "holds all of it already" in again.stdout
