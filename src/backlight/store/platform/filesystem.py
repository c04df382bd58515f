"""Which file system a folder is on: SQLite's write-ahead log does not reliably work on network storage."""

from __future__ import annotations

import re
from pathlib import Path

NETWORK_TYPES = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs", "gpfs", "lustre"),
        *("mmfs", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs"),
        *("vboxsf", "virtiofs", "wekafs", "prl_fs", "vmhgfs"),
    }
)
"""Types that other machines may share, by the names of the Linux kernel and of common clients."""

_LOCAL_FUSE = frozenset({"fuseblk", "fuse.ntfs-3g", "fuse.exfat", "fuse.fuse-overlayfs", "fuse.overlayfs"})
_MOUNTS = Path("/proc/self/mountinfo")


def file_system_type(path: Path) -> str:
    """Return the type of the file system that holds ``path``, empty where the system does not tell.

    The path need not exist: its nearest existing parent counts.
    """
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        place = path.absolute().resolve()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        if len(words) < 5 or not rest:
            continue
        mount = Path(_unescape(words[4]))
        # Of two mounts on one point, the later one lies on top.
        if (place == mount or mount in place.parents) and len(mount.parts) >= best:
            best, kind = len(mount.parts), rest.split()[0]
    return kind


def is_network_type(kind: str) -> bool:
    """Tell whether a file system of this type may be shared with other machines."""
    if kind in _LOCAL_FUSE:
        return False
    return kind in NETWORK_TYPES or kind == "fuse" or kind.startswith("fuse.")


def on_network(path: Path) -> bool:
    """Tell whether ``path`` lies on storage that other machines may share."""
    return is_network_type(file_system_type(path))


def _unescape(mount: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), mount)
