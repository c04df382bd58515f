"""Ranks without access to the run of rank 0, restarted jobs, and missing or different ranks."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backlight.records import RunStatus
from backlight.store.errors import RunExistsError, RunFormatError
from backlight.store.read.run import open_run
from backlight.store.write.attempt import part_path
from backlight.store.write.compact import compact, merge_hosts
from backlight.store.write.writer import RunWriter

Record = Callable[..., object]
Digest = Callable[[Path], dict[str, str]]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Change the host name of this process."""
    return lambda name: monkeypatch.setattr(socket, "gethostname", lambda: name)


def two_hosts(
    tmp_path: Path, host: Callable[[str], None], record: Record, launch: str = "job+0"
) -> list[Path]:
    """Record four ranks of one launch: 0 and 1 on node0, 2 and 3 on node1, in separate directories."""
    paths = []
    for name, ranks in (("node0", (0, 1)), ("node1", (2, 3))):
        host(name)
        path = tmp_path / name / "run"
        writers = [
            RunWriter.create(path, rank=rank, world_size=4, run_id=launch, join_timeout=0.05, resume=True)
            for rank in ranks
        ]
        for writer in writers:
            record(writer, 3)
            writer.scalar(0, "rank", writer.rank, source="user")
            writer.array("spectrum", 1, np.full(2, float(writer.rank)))
            writer.evidence(f"stack-{writer.rank}.txt", "here")
            writer.close()
        paths.append(writers[0].path)
    return paths


def test_ranks_without_the_run_of_rank_zero_write_a_part(
    tmp_path: Path, host: Callable[[str], None], record: Record
) -> None:
    run, part = two_hosts(tmp_path, host, record)
    assert part == part_path(tmp_path / "node1" / "run")
    assert part.name == "run.part-node1"
    alone = open_run(part)
    assert (alone.status, alone.attempts[0].ranks) == (RunStatus.FINISHED, (2, 3))
    assert alone.losses == (
        "attempt 0: rank 0 of 4 left no file",
        "attempt 0: rank 1 of 4 left no file",
        "attempt 0: this folder holds only the ranks of node1, which could not reach the run of rank 0;"
        " add it there with `backlight join RUN PART`",
    )
    assert open_run(run).losses == (
        "attempt 0: rank 2 of 4 left no file",
        "attempt 0: rank 3 of 4 left no file",
    )


@pytest.mark.slow
def test_parts_are_joined(
    tmp_path: Path, host: Callable[[str], None], record: Record, digest: Digest
) -> None:
    run, part = two_hosts(tmp_path, host, record)
    part_before = digest(part)
    found = merge_hosts(run, [part])
    assert found.ranks == {0: [2, 3]}
    joined = open_run(run)
    assert (joined.losses, joined.attempts[0].ranks) == ((), (0, 1, 2, 3))
    assert [joined.scalar("rank", "user", rank=r).values.tolist() for r in range(4)] == [[0], [1], [2], [3]]
    assert joined.array("spectrum", rank=3)[1][0].tolist() == [3.0, 3.0]
    assert sorted(p.rsplit("/", 1)[1] for p in joined.evidence()) == [f"stack-{r}.txt" for r in range(4)]
    assert digest(part) == part_before
    before = digest(run)
    assert (merge_hosts(run, [part]).files, digest(run)) == (0, before)
    compact(run)
    assert open_run(run).losses == ()


@pytest.mark.slow
def test_compacted_part_is_joined(tmp_path: Path, host: Callable[[str], None], record: Record) -> None:
    run, part = two_hosts(tmp_path, host, record)
    compact(part)
    assert open_run(part).attempts[0].ranks == (2, 3)
    merge_hosts(run, [part])
    assert open_run(run).losses == ()


@pytest.mark.slow
def test_later_launch_is_joined_to_its_own_attempt(
    tmp_path: Path, host: Callable[[str], None], record: Record
) -> None:
    host("node0")
    RunWriter.create(tmp_path / "node0" / "run", run_id="alone").close()
    run, part = two_hosts(tmp_path, host, record)
    assert [open_run(run).attempts[-1].index, open_run(part).attempts[-1].index] == [1, 0]
    assert merge_hosts(run, [part]).ranks == {1: [2, 3]}
    files = json.loads((run / "attempt-001" / "rank-00002.json").read_text())["progress"]["files"]
    assert "attempt-001/rank-00002.db" in files
    assert [a.ranks for a in open_run(run).attempts] == [(0,), (0, 1, 2, 3)]
    assert not [loss for loss in open_run(run).losses if "attempt 1" in loss]


@pytest.mark.slow
def test_parts_of_other_launches_are_rejected(
    tmp_path: Path, host: Callable[[str], None], record: Record, digest: Digest
) -> None:
    run, part = two_hosts(tmp_path, host, record)
    _, foreign = two_hosts(tmp_path / "other", host, record, launch="job-2+0")
    before = digest(run)
    with pytest.raises(RunExistsError, match=r"belongs to launch 'job-2\+0', of which .* has no attempt"):
        merge_hosts(run, [foreign])
    with pytest.raises(RunExistsError, match="is the run itself; give the folders that other hosts wrote"):
        merge_hosts(run, [run])
    with pytest.raises(RunFormatError, match="there is no such folder"):
        merge_hosts(run, [tmp_path / "gone"])
    assert digest(run) == before
    merge_hosts(run, [part])
    (part / "attempt-000" / "rank-00002.db").write_bytes(b"another")
    with pytest.raises(RunExistsError, match=r"rank-00002\.db: exists with another content than"):
        merge_hosts(run, [part])
    writer = RunWriter.create(tmp_path / "living")
    with pytest.raises(RunExistsError, match="is still being written by process"):
        merge_hosts(run, [tmp_path / "living"])
    with pytest.raises(RunExistsError, match="join it when that has ended"):
        merge_hosts(tmp_path / "living", [part])
    writer.close()


@pytest.mark.slow
def test_restarted_job_takes_over_from_an_unreachable_host(
    tmp_path: Path, killed: Callable[..., Path], host: Callable[[str], None]
) -> None:
    path = killed(tmp_path / "run", "RunWriter.create(path, run_id='slurm-7+0'); ready()")
    host("elsewhere")  # its process is not observable from there
    assert open_run(path).status is RunStatus.RUNNING
    with pytest.raises(RunExistsError, match="is still being written"):
        RunWriter.create(path, run_id="slurm-8+0")
    RunWriter.create(path, run_id="slurm-7+1").close()
    assert [a.status for a in open_run(path).attempts] == [RunStatus.KILLED, RunStatus.FINISHED]


def test_running_start_of_the_same_job_is_not_taken_over(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", run_id="slurm-7+0")
    with pytest.raises(RunExistsError, match="is still being written"):
        RunWriter.create(tmp_path / "run", run_id="slurm-7+1")
    writer.close()


@pytest.mark.slow
def test_ranks_with_different_options_are_reported(tmp_path: Path, record: Record) -> None:
    options_by_rank = [
        {"monitors": ["health"], "every": 1},
        {"monitors": ["health"], "every": 2},
        {"monitors": ["health", "stalls"], "every": 1},
        {"monitors": ["health"], "every": 2},
    ]
    writers = [
        RunWriter.create(tmp_path / "run", rank=r, world_size=4, run_id="x", options=options)
        for r, options in enumerate(options_by_rank)
    ]
    for writer in writers:
        record(writer, 2)
        writer.close()
    assert open_run(tmp_path / "run").losses == (
        "attempt 0: ranks 1, 3 did not record what rank 0 did: every 2 instead of 1; sharded parameters are"
        " measured only where all ranks recorded",
        "attempt 0: rank 2 did not record what rank 0 did: monitors health,stalls instead of health; sharded"
        " parameters are measured only where all ranks recorded",
    )
    compact(tmp_path / "run")
    assert len(open_run(tmp_path / "run").losses) == 2
