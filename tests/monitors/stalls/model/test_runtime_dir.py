"""Runtime directories: owner and key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backlight.monitors.stalls.model import runtime_dir
from backlight.monitors.stalls.model.rank_observer import RankObserver
from backlight.monitors.stalls.model.shared_state import PHASES, RankStatus, SharedState, Slot
from backlight.monitors.stalls.model.timeouts import StallLimits
from backlight.records import Phase


def test_runtime_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="belongs to another user"):
        runtime_dir.create(tmp_path / "link")


@pytest.mark.parametrize("kind", ["graph", "names", "buckets", "exit", "stacks"])
@pytest.mark.parametrize("content", ["7", "null", '{"base": 0}', '[{"at": 1}, "nonsense"]', "{", "[[0]]"])
def test_malformed_documents_of_a_rank_are_left_out(kind: str, content: str, tmp_path: Path) -> None:
    observer = RankObserver(tmp_path, 3, StallLimits())
    shared = SharedState(runtime_dir.state_path(tmp_path, 3))
    shared.open(rank=3, world_size=1, main_ident=1, main_tid=os.getpid(), timeout_s=None)
    shared.slots[Slot.PHASE] = PHASES.index(Phase.BACKWARD)
    shared.close(RankStatus.FAILED)
    runtime_dir.document_path(tmp_path, 3, kind).write_text(content)
    observer.poll()
    found = observer.observe()
    observer.close()
    assert (found.exit_reason, found.graph_build, found.samples) == (None, None, ())
    assert found.buckets == (((0,),) if (kind, content) == ("buckets", "[[0]]") else ())


def test_runtime_directory_depends_on_attempt_and_launch(tmp_path: Path) -> None:
    one = runtime_dir.runtime_directory(tmp_path, 0, "a")
    assert one == runtime_dir.runtime_directory(tmp_path, 0, "a")
    assert one != runtime_dir.runtime_directory(tmp_path, 1, "a")
    assert one != runtime_dir.runtime_directory(tmp_path, 0, "b")
