"""Entering where the kernel's locks do not reach: one file that only one process can create."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backlight.records import to_json
from backlight.store.errors import RunExistsError
from backlight.store.platform import filesystem
from backlight.store.platform.process import ProcessIdentity
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter


@pytest.fixture(autouse=True)
def _network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every folder is network storage, where the kernel's locks have no effect."""
    monkeypatch.setattr(filesystem, "on_network", lambda _: True)
    monkeypatch.setattr(filesystem.fcntl, "flock", lambda *_: None)


def claimed_by(claim: Path, **changes: object) -> None:
    claim.write_text(json.dumps(to_json(ProcessIdentity.of_this_process()) | changes))


def test_the_claim_is_held_and_removed(tmp_path: Path) -> None:
    with filesystem.locked(tmp_path):
        assert json.loads((tmp_path / filesystem.CLAIM).read_text())["pid"] == os.getpid()
        with (
            pytest.raises(RunExistsError, match=r"just opening or compacting this run.*remove .*\.entering"),
            filesystem.locked(tmp_path, timeout_s=0.05),
        ):
            pytest.fail("two processes held the claim")
    assert list(tmp_path.iterdir()) == []


def test_the_claim_of_an_ended_process_is_replaced(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    claimed_by(tmp_path / filesystem.CLAIM, pid=gone.pid, start="1")
    with filesystem.locked(tmp_path, timeout_s=0.05):
        assert json.loads((tmp_path / filesystem.CLAIM).read_text())["pid"] == os.getpid()


def test_a_claim_of_another_machine_counts_until_it_is_old(tmp_path: Path) -> None:
    claim = tmp_path / filesystem.CLAIM
    claimed_by(claim, host="elsewhere")
    with pytest.raises(RunExistsError, match="just opening"), filesystem.locked(tmp_path, timeout_s=0.05):
        pytest.fail("the claim of a host that cannot be asked did not count")
    old = claim.stat().st_mtime - filesystem.STALE_CLAIM_S - 1
    os.utime(claim, (old, old))
    with filesystem.locked(tmp_path, timeout_s=0.05):
        pass


def test_creating_a_run_leaves_no_claim(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunWriter.create(path).close()
    assert sorted(p.name for p in path.iterdir()) == ["attempt-000", "manifest.json"]
    assert open_run(path).losses == ()


def test_of_simultaneous_processes_without_locks_one_gets_the_folder(tmp_path: Path) -> None:
    code = """
import sys, fcntl
from backlight.store.platform import filesystem
from backlight.store.errors import RunExistsError
from backlight.store.write.writer import RunWriter
filesystem.on_network = lambda _: True
fcntl.flock = lambda *_: None
print("up", flush=True); sys.stdin.readline()
try:
    writer = RunWriter.create(sys.argv[1]); print("mine", flush=True); sys.stdin.readline(); writer.close()
except RunExistsError as error:
    print("refused", flush=True)
"""
    line = [sys.executable, "-c", code, str(tmp_path / "run")]
    several = [
        subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    try:
        for process in several:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        for process in several:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [process.stdout.readline().strip() for process in several if process.stdout is not None]
    finally:
        for process in several:
            process.communicate("\n")
    assert sorted(answers) == ["mine", "refused", "refused", "refused"]
    assert len(open_run(tmp_path / "run").attempts) == 1
