"""Files of an attempt: wait until every rank has closed its file."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from backlight.records import RunStatus
from backlight.store.write.attempt import wait_for_ranks
from backlight.store.write.writer import RunWriter


def writers(path: Path) -> tuple[RunWriter, RunWriter]:
    first = RunWriter.create(path, rank=0, world_size=2, run_id="together")
    return first, RunWriter.create(path, rank=1, world_size=2, run_id="together")


def test_wait_lasts_until_every_writing_rank_has_closed(tmp_path: Path) -> None:
    first, second = writers(tmp_path / "run")
    first.close(RunStatus.FINISHED)
    assert not wait_for_ranks(tmp_path / "run", 0.2)
    later = threading.Timer(0.3, second.close, [RunStatus.FINISHED])
    later.start()
    begin = time.monotonic()
    assert wait_for_ranks(tmp_path / "run", 20)
    assert time.monotonic() - begin >= 0.2
    later.join()


def test_single_rank_is_complete_and_missing_run_is_not(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "one").close(RunStatus.FINISHED)
    assert wait_for_ranks(tmp_path / "one", 0)
    assert not wait_for_ranks(tmp_path / "nothing", 0)


def test_rank_without_a_file_is_not_awaited(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", rank=0, world_size=2, run_id="alone")
    assert wait_for_ranks(tmp_path / "run", 0)
    writer.close()
