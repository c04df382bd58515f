"""File system types, and the lock on network storage: a file that only one process can create."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backlight import codec
from backlight.store import filesystem
from backlight.store.errors import RunWriteError
from backlight.store.filesystem import ProcessIdentity
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:25 / /home rw,relatime - nfs4 server:/home rw,vers=4.2
31 30 0:26 / /home/local\040disk rw,relatime - xfs /dev/sdb1 rw
32 22 0:27 / /data rw - ext4 /dev/sdc1 rw
33 32 0:28 / /data rw - lustre mgs@tcp:/scratch rw
34 22 0:29 / /mnt/ssh rw - fuse.sshfs user@host:/ rw
35 22 0:30 / /mnt/usb rw - fuseblk /dev/sdd1 rw
broken line
"""


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mountinfo"
    file.write_text(MOUNTS)
    monkeypatch.setattr(filesystem, "_MOUNTS", file)


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/nowhere/at/all", "ext4", False),
        ("/home/runs/first", "nfs4", True),
        ("/home/local disk/runs", "xfs", False),
        ("/homework", "ext4", False),
        ("/data/runs", "lustre", True),
        ("/mnt/ssh/runs", "fuse.sshfs", True),
        ("/mnt/usb/runs", "fuseblk", False),
    ],
)
def test_innermost_and_latest_mount_is_used(path: str, kind: str, network: bool) -> None:
    assert filesystem.file_system_type(Path(path)) == kind
    assert filesystem.on_network(Path(path)) is network


SHARED = ("nfs", "cifs", "smb3", "9p", "ceph", "virtiofs", "fuse", "fuse.glusterfs")
LOCAL = ("", "ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs", "apfs")


@pytest.mark.parametrize("kind", [*SHARED, *LOCAL])
def test_network_types(kind: str) -> None:
    assert filesystem.is_network_type(kind) is (kind in SHARED)


def test_unknown_file_system_counts_as_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(filesystem, "_MOUNTS", tmp_path / "missing")
    assert filesystem.file_system_type(tmp_path) == ""
    assert not filesystem.on_network(tmp_path)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make every directory network storage without kernel locks."""
    monkeypatch.setattr(filesystem, "on_network", lambda _: True)
    monkeypatch.setattr(filesystem.fcntl, "flock", lambda *_: None)


def claimed_by(claim: Path, **changes: object) -> None:
    claim.write_text(json.dumps(codec.plain(ProcessIdentity.of_this_process()) | changes))


@pytest.mark.usefixtures("network")
def test_claim_is_held_and_removed(tmp_path: Path) -> None:
    with filesystem.locked(tmp_path):
        assert json.loads((tmp_path / filesystem.CLAIM).read_text())["pid"] == os.getpid()
        with (
            pytest.raises(RunWriteError, match=r"just opening or compacting this run.*remove .*\.entering"),
            filesystem.locked(tmp_path, timeout_s=0.05),
        ):
            pytest.fail("two processes held the claim")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("network")
def test_claim_of_an_exited_process_is_replaced(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    claimed_by(tmp_path / filesystem.CLAIM, pid=gone.pid, start="1")
    with filesystem.locked(tmp_path, timeout_s=0.05):
        assert json.loads((tmp_path / filesystem.CLAIM).read_text())["pid"] == os.getpid()


@pytest.mark.usefixtures("network")
def test_claim_of_another_machine_expires(tmp_path: Path) -> None:
    claim = tmp_path / filesystem.CLAIM
    claimed_by(claim, host="elsewhere")
    with pytest.raises(RunWriteError, match="just opening"), filesystem.locked(tmp_path, timeout_s=0.05):
        pytest.fail("the claim of a host that cannot be asked did not count")
    old = claim.stat().st_mtime - filesystem.STALE_CLAIM_S - 1
    os.utime(claim, (old, old))
    with filesystem.locked(tmp_path, timeout_s=0.05):
        pass


@pytest.mark.usefixtures("network")
def test_creating_a_run_leaves_no_claim(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunWriter.create(path).close()
    assert sorted(p.name for p in path.iterdir()) == ["attempt-000", "manifest.json"]
    assert open_run(path).losses == ()


WITHOUT_LOCKS = "filesystem.on_network = lambda _: True; filesystem.fcntl.flock = lambda *_: None"


@pytest.mark.slow
@pytest.mark.parametrize("locks", ["", WITHOUT_LOCKS], ids=["kernel", "claim"])
def test_one_of_several_concurrent_processes_gets_the_directory(tmp_path: Path, locks: str) -> None:
    code = f"""
import sys
from backlight.store import filesystem
from backlight.store.errors import RunExistsError
from backlight.store.write.writer import RunWriter
{locks}
print("up", flush=True); sys.stdin.readline()
try:
    writer = RunWriter.create(sys.argv[1]); print("mine", flush=True); sys.stdin.readline(); writer.close()
except RunExistsError as error:
    print("refused", flush=True)
"""
    line = [sys.executable, "-c", code, str(tmp_path / "run")]
    several = [subprocess.Popen(line, stdin=-1, stdout=-1, text=True) for _ in range(3)]
    try:
        assert [process.stdout.readline() for process in several] == 3 * ["up\n"]
        for process in several:
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [process.stdout.readline().strip() for process in several]
    finally:
        for process in several:
            process.communicate("\n")
    assert sorted(answers) == ["mine", "refused", "refused"]
    assert len(open_run(tmp_path / "run").attempts) == 1
