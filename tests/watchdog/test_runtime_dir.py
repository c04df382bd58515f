"""Runtime directories: owner and key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backlight.records import Phase
from backlight.watchdog import attach, runtime_dir
from backlight.watchdog.observation import Buckets
from backlight.watchdog.observer import RankObserver
from backlight.watchdog.shared_state import PHASES, RankStatus, SharedState, Slot, read_state
from backlight.watchdog.timeouts import StallLimits


def occupied(kind: str, path: Path) -> Path:
    """Put at ``path`` what another user may have put there first."""
    if kind == "link":
        (path.parent / "real").mkdir(mode=0o700)
        path.symlink_to(path.parent / "real")
    elif kind == "open":
        path.mkdir()
        path.chmod(0o777)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "file":
        path.touch()
    elif os.geteuid():
        pytest.skip("needs root to act as another user")
    else:
        path.mkdir(mode=0o700)
        os.chown(path, 65534, 65534)
    return path


OCCUPIED = ["link", "open", "fifo", "file", "foreign"]


@pytest.mark.parametrize("kind", OCCUPIED)
def test_runtime_directory_of_another_user_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="belongs to another user, or is open to others"):
        runtime_dir.create(occupied(kind, tmp_path / "taken"))


@pytest.mark.parametrize("kind", OCCUPIED)
def test_next_directory_is_used_where_another_user_took_the_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = occupied(kind, tmp_path / "taken")
    monkeypatch.setattr(runtime_dir, "candidates", lambda: [taken, tmp_path / "own"])
    directory = runtime_dir.runtime_directory(tmp_path, 0)
    assert directory.parent == tmp_path / "own"
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    runtime_dir.create(directory)
    assert list(runtime_dir.runtime_directories()) == [directory]
    monkeypatch.setattr(runtime_dir, "candidates", lambda: [taken])
    with pytest.raises(PermissionError, match="set XDG_RUNTIME_DIR"):
        runtime_dir.runtime_directory(tmp_path, 0)


def test_runtime_directory_of_the_session_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    assert next(iter(runtime_dir.candidates())) == tmp_path / "backlight"
    tmp_path.chmod(0o755)
    assert tmp_path not in next(iter(runtime_dir.candidates())).parents
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert tmp_path not in next(iter(runtime_dir.candidates())).parents


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fifo", "zero", "large", "garbage", "directory"])
def test_unreadable_neighbour_is_skipped(kind: str, directory: Path) -> None:
    """A file in a runtime directory can neither block its reader nor fill its memory."""
    planted = directory / "0planted"
    planted.mkdir(mode=0o700)
    state = runtime_dir.state_path(planted, 0)
    match kind:
        case "fifo":
            os.mkfifo(state)
            os.mkfifo(planted / runtime_dir.WATCHDOG)
        case "zero":
            state.symlink_to("/dev/zero")
            (planted / runtime_dir.WATCHDOG).symlink_to("/dev/zero")
        case "large":
            state.touch()
            os.truncate(state, 10**12)
            (planted / runtime_dir.WATCHDOG).write_text("[" * 10**5)
        case "directory":
            state.mkdir()
        case _:
            shared = SharedState(state)
            shared.open(rank=0, world_size=1, main_ident=1, main_tid=1, timeout_s=None)
            shared.slots[Slot.STATUS] = 99
    assert read_state(state) is None
    abandoned = directory / "abandoned"
    abandoned.mkdir(mode=0o700)
    os.utime(abandoned, (0, 0))
    runtime_dir.remove_abandoned()
    assert not abandoned.exists()
    assert planted.exists()
    assert attach.attach(os.getpid(), 0.01, native=False).pid == os.getpid()


BUCKETS = '{"rows": [[0]], "numels": [4], "shard_rows": [[0]], "shard_numels": [2]}'


@pytest.mark.parametrize("kind", ["graph", "names", "buckets", "exit", "stacks", "collectives"])
@pytest.mark.parametrize(
    "content", ["7", "null", '{"base": 0}', '[{"at": 1}, "nonsense"]', "{", "[[0]]", BUCKETS, '{"dump": {}}']
)
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
    assert (found.exit_reason, found.graph_build, found.samples, found.issued.dump) == (None, None, (), None)
    read = Buckets(((0,),), (4,), ((0,),), (2,))
    assert found.buckets == (read if (kind, content) == ("buckets", BUCKETS) else Buckets())


def test_runtime_directory_depends_on_attempt_and_launch(tmp_path: Path) -> None:
    one = runtime_dir.runtime_directory(tmp_path, 0, "a")
    assert one == runtime_dir.runtime_directory(tmp_path, 0, "a")
    assert one != runtime_dir.runtime_directory(tmp_path, 1, "a")
    assert one != runtime_dir.runtime_directory(tmp_path, 0, "b")
