"""No command changes a file outside of a run, whatever side files, links and names the run carries."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backlight import atomic_files
from backlight.cli.app import main
from backlight.store.errors import RunFormatError, StoreError
from backlight.store.format.manifest import read_document, seal
from backlight.store.read.run import open_run
from backlight.store.read.snapshot import SIDE_FILES, Snapshot
from backlight.store.write import columnar
from backlight.store.write import compact as compact_module
from backlight.store.write.compact import compact, merge_hosts
from backlight.store.write.writer import RunWriter
from fuzz.mutation import journal

pytestmark = pytest.mark.slow

DATABASE = "attempt-000/rank-00000.db"
Plant = Callable[[Path, Path], None]


def state_of(folder: Path) -> dict[str, tuple[object, ...]]:
    """Return what a change to a tree would change, times included."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        about = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (about.st_mode, about.st_ino, about.st_mtime_ns, content)
    return found


def super_journal(*others: str) -> Plant:
    def plant(run: Path, outside: Path) -> None:
        (run / f"{DATABASE}-journal").write_bytes(journal(outside / "private.txt"))
        for suffix in others:
            (run / f"{DATABASE}{suffix}").write_bytes(b"")

    return plant


def linked(name: str, target: str, *, hard: bool = False) -> Plant:
    def plant(run: Path, outside: Path) -> None:
        path = run / name.format(pid=os.getpid())
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        if hard:
            path.hardlink_to(outside / target)
        else:
            path.symlink_to(outside / target)

    return plant


def local_folder(run: Path, outside: Path) -> None:
    document = read_document(run / "manifest.json")
    document["attempts"][0]["progress"]["local"] = str(outside / "other/attempt-000")
    (run / "manifest.json").write_bytes(seal(json.dumps(document)))


TEMPORARY = (
    ".report.html.{pid}.tmp", ".report.md.{pid}.tmp", ".manifest.json.{pid}.tmp",
    "attempt-000/.rank-00000.json.{pid}.tmp", "attempt-000/.rank-00000.db.{pid}.tmp",
    "attempt-000/.rank-00001.db.{pid}.tmp", "attempt-000/arrays/.rank-00000-000000-000001.h5.{pid}.tmp",
)  # fmt: skip
FOLDERS = ("attempt-001", "attempt-000/arrays", "attempt-000/evidence", "attempt-000/columns-000000")
PLANTED: dict[str, Plant] = {
    "super-journal": super_journal(),
    "super-journal, empty log": super_journal("-wal"),
    "super-journal, empty log and index": super_journal("-wal", "-shm"),
    **{f"link {suffix}": linked(DATABASE + suffix, "private.txt") for suffix in SIDE_FILES},
    **{f"second name {suffix}": linked(DATABASE + suffix, "private.txt", hard=True) for suffix in SIDE_FILES},
    **{f"link {name}": linked(name, "private.txt") for name in ("manifest.json", DATABASE, "report.html")},
    "link of a document": linked("attempt-000/rank-00000.json", "private.txt"),
    **{f"link {name}": linked(name, "private.txt") for name in TEMPORARY},
    **{f"link of {name}": linked(name, "folder") for name in FOLDERS},
    "link of an attempt": linked("attempt-000", "other/attempt-000"),
    "temporary folder": linked(".x.tmp", "folder"),
    "evidence": linked("attempt-000/evidence/stack.txt", "private.txt"),
    "piece": linked("attempt-000/arrays/rank-00000-000007.h5", "private.txt"),
    "local folder": local_folder,
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Return a tree of the user, with what sweeping, merging and removing would find in a run."""
    folder = tmp_path / "outside"
    (folder / "folder").mkdir(parents=True)
    (folder / "private.txt").write_text("private")
    (folder / "private.txt").chmod(0o600)
    written(folder / "other")
    for path in (folder / "other/attempt-000/arrays").iterdir():
        shutil.copyfile(path, folder / "folder" / path.name)
    for name in (".x.tmp", "rank-00000.db", "index.json"):
        (folder / "folder" / name).write_text("private")
    return folder


def written(path: Path, rank: int = 0) -> Path:
    writer = RunWriter.create(
        path, run_id="one", launch="one", rank=rank, world_size=rank + 1, join_timeout=0.05
    )
    with writer:
        for step in range(4):
            writer.array("weights", step, np.arange(6.0), dims=("w",))
            writer.scalar(step, "loss", 1.0 / (step + 1))
            writer.flush()
        writer.evidence("notes.txt", "recorded")
    return writer.path


def commands(run: Path, other: Path, target: Path) -> Iterator[list[str]]:
    for name in ("report", "findings"):
        yield [name, str(run)]
    yield ["report", str(run), "--md"]
    yield ["report", str(run), "--bundle", str(target / "bundle.zip")]
    yield ["ls", str(run.parent)]
    yield ["compare", str(run), str(other), "-o", str(target / "compared.html")]
    yield ["export", str(run), str(target / "run.h5")]
    yield ["export", str(run), str(target / "run.csv")]
    yield ["query", "select count(*) from scalars", str(run)]
    yield ["join", str(other), str(run)]
    yield ["join", str(run), str(other)]
    yield ["compact", str(run)]


@pytest.mark.parametrize("kind", PLANTED)
def test_nothing_outside_of_a_run_changes(
    kind: str, outside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other, target = (
        written(tmp_path / "runs/run"),
        written(tmp_path / "other", rank=1),
        tmp_path / "target",
    )
    target.mkdir()
    PLANTED[kind](run, outside)
    before = state_of(outside)
    for arguments in commands(run, other, target):
        with contextlib.suppress(SystemExit):
            main(arguments)
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err, arguments
        assert state_of(outside) == before, arguments
    if kind.startswith("second name"):  # of a file of the same user, in a directory of the same user
        return
    copied = [p for folder in (target, other) for p in folder.rglob("*") if p.is_file()]
    assert [p for p in copied if b"private" in p.read_bytes()] == []


@pytest.mark.parametrize("suffix", SIDE_FILES)
@pytest.mark.parametrize("plant", ["journal", "link", "second name"])
def test_run_that_states_to_be_live_changes_nothing(
    plant: str, suffix: str, outside: Path, tmp_path: Path
) -> None:
    run = written(tmp_path / "run")
    for other in SIDE_FILES:
        (run / f"{DATABASE}{other}").touch()
    if plant == "journal":
        super_journal()(run, outside)
    else:
        linked(DATABASE + suffix, "private.txt", hard=plant == "second name")(run, outside)
    before = state_of(outside)
    with contextlib.suppress(RunFormatError):
        Snapshot(run / DATABASE, live=True).rows("SELECT count(*) FROM scalar")
    assert state_of(outside) == before


def test_rows_in_the_log_of_a_killed_run_survive_a_hostile_journal(
    tmp_path: Path, outside: Path, killed: Callable[..., Path]
) -> None:
    body = "writer = RunWriter.create(path)\nrecord(writer, 1000)\nwriter.flush()\nready()"
    run = killed(tmp_path / "run", body)
    assert (run / f"{DATABASE}-wal").stat().st_size > 0
    super_journal()(run, outside)
    before = state_of(outside)
    for _ in range(2):
        assert open_run(run).scalar("loss").steps.tolist() == list(range(1000))
        compact(run)
        assert state_of(outside) == before
    left = {path.name for path in (run / "attempt-000").iterdir()}
    assert left == {"rank-00000.json", "columns-000000"}, "no side file outlives its database"


MOMENTS = {
    compact_module: (
        "refuse_links", "locked", "_compact", "open_attempt", "_refuse_running", "_compact_attempt", "_sweep",
        "_merge_logs", "_pieces", "write_piece", "_to_columns", "_remove_replaced", "_finish",
    ),
    columnar: ("write_dataset",),
    columnar._Conversion: ("run", "_lists", "_verify"),
    atomic_files: ("copy", "replacing", "temporary_name", "sync_file", "publish"),
}  # fmt: skip
"""Functions before which a folder is replaced by a link."""


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="folders cannot be held open here")
@pytest.mark.parametrize("name", ["", "attempt-000", "attempt-000/arrays", "attempt-000/.columns-*.tmp"])
@pytest.mark.parametrize("moment", [(owner, name) for owner, names in MOMENTS.items() for name in names])
def test_a_folder_that_becomes_a_link_while_it_is_compacted_leads_nowhere(
    moment: tuple[Any, str], name: str, tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path / "run")
    (run / f"{DATABASE}-wal").write_bytes(b"")
    shutil.copyfile(run / DATABASE, outside / "folder/rank-00000.db")
    for file in ("gradient.parquet", "manifest.json", "rank-00000.db-wal"):
        (outside / "folder" / file).write_text("private")
    target = outside / {"": "other", "attempt-000": "other/attempt-000"}.get(name, "folder")
    owner, function = moment
    original, before = getattr(owner, function), state_of(outside)

    def swapping(*arguments: Any, **named: Any) -> Any:
        for number, folder in enumerate([run] if not name else run.glob(name)):
            if not folder.is_symlink():
                folder.rename(tmp_path / f"aside-{number}")
                folder.symlink_to(target)
        return original(*arguments, **named)

    monkeypatch.setattr(owner, function, swapping)
    with contextlib.suppress(StoreError):
        compact(run)
    assert state_of(outside) == before


def test_links_are_refused_by_name(tmp_path: Path, outside: Path) -> None:
    run, part = written(tmp_path / "run"), written(tmp_path / "part", rank=1)
    linked("attempt-000/evidence/stack.txt", "private.txt")(part, outside)
    with pytest.raises(RunFormatError, match=r"stack\.txt: it is a symbolic link, expected a regular file"):
        merge_hosts(run, [part])
    assert not (run / "attempt-000/rank-00001.db").exists(), "nothing was copied"
    linked("attempt-000/arrays", "folder")(run, outside)
    message = r"arrays: is a symbolic link, expected a folder; copy what it points to into the run"
    for change in (lambda: compact(run), lambda: merge_hosts(run, [part])):
        with pytest.raises(RunFormatError, match=message):
            change()


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to act as another user"
)
def test_second_name_in_the_directory_of_another_user_is_refused(tmp_path: Path, outside: Path) -> None:
    run, part = written(tmp_path / "run"), written(tmp_path / "part", rank=1)
    linked("attempt-000/evidence/stack.txt", "private.txt", hard=True)(part, outside)
    os.chown(part / "attempt-000/evidence", 65534, 65534)
    with pytest.raises(RunFormatError, match=r"stack\.txt: it is a second name of a file of another user"):
        merge_hosts(run, [part])
