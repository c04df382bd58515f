from __future__ import annotations

from pathlib import Path

import pytest

from backlight.store.platform import filesystem

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
def test_the_innermost_and_latest_mount_counts(path: str, kind: str, network: bool) -> None:
    assert filesystem.file_system_type(Path(path)) == kind
    assert filesystem.on_network(Path(path)) is network


@pytest.mark.parametrize("kind", ["nfs", "cifs", "smb3", "9p", "ceph", "virtiofs", "fuse", "fuse.glusterfs"])
def test_shared_types(kind: str) -> None:
    assert filesystem.is_network_type(kind)


@pytest.mark.parametrize("kind", ["", "ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs", "apfs"])
def test_local_types(kind: str) -> None:
    assert not filesystem.is_network_type(kind)


def test_an_unknown_file_system_counts_as_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(filesystem, "_MOUNTS", tmp_path / "missing")
    assert filesystem.file_system_type(tmp_path) == ""
    assert not filesystem.on_network(tmp_path)
