"""File systems, local or shared, and the processes on them: who writes a run, and who may enter it.

SQLite's write-ahead log and the kernel's locks do not work reliably on network storage. A process id alone is
reused: together with the boot of the machine, the process namespace and the start time it is unique.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from backlight import clock, codec, processes, untrusted_files
from backlight.store.errors import RunFormatError, RunWriteError

if sys.platform != "win32":
    import fcntl

NETWORK_TYPES = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs", "gpfs", "lustre"),
        *("mmfs", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs"),
        *("vboxsf", "virtiofs", "wekafs", "prl_fs", "vmhgfs"),
    }
)
"""Types that other machines may share, by the names of the Linux kernel and of common clients."""

LOCK_TIMEOUT_S = 5.0
"""Wait for another process that is entering the same folder."""

CLAIM = ".entering"
"""Name of the file that only one process, of any machine, can create."""

STALE_CLAIM_S = 600.0
"""Age after which the claim of a process on another machine is taken as left behind."""

_LOCAL_FUSE = frozenset({"fuseblk", "fuse.ntfs-3g", "fuse.exfat", "fuse.fuse-overlayfs", "fuse.overlayfs"})
_MOUNTS = Path("/proc/self/mountinfo")
_DESCRIPTORS = Path("/proc/self/fd")


def file_system_type(path: Path) -> str:
    """Return the type of the file system of ``path`` or of its nearest parent, empty where not known."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        resolved = path.absolute().resolve()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        if len(words) < 5 or not rest:
            continue
        mount = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[4]))
        # Of two mounts on one point, the later one lies on top.
        if (resolved == mount or mount in resolved.parents) and len(mount.parts) >= best:
            best, kind = len(mount.parts), rest.split()[0]
    return kind


def is_network_type(kind: str) -> bool:
    """Return whether a file system of this type may be shared with other machines."""
    if kind in _LOCAL_FUSE:
        return False
    return kind in NETWORK_TYPES or kind == "fuse" or kind.startswith("fuse.")


def on_network(path: Path) -> bool:
    """Return whether ``path`` lies on storage that other machines may share."""
    return is_network_type(file_system_type(path))


def folder_size(path: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(p.lstat().st_size for p in path.rglob("*") if p.is_file())


def refuse_links(run: Path) -> None:
    """Raise a RunFormatError for a link among the folders of a run: a change would be made elsewhere."""
    for folder, names, _ in os.walk(run):
        for path in (Path(folder, name) for name in names):
            if path.is_symlink():
                msg = f"{path}: is a symbolic link, expected a folder; copy what it points to into the run"
                raise RunFormatError(f"{msg}, or remove it")


@contextlib.contextmanager
def pinned(folder: Path, *, links: bool = False) -> Iterator[Path]:
    """Yield a path to a folder that stays the same one, whatever takes its name meanwhile.

    With ``links`` the folder may be a link. Where the system has no such paths (``/proc``), it is the name.

    Raises
    ------
    OSError
        If it is no folder.
    """
    if not _DESCRIPTORS.is_dir():
        yield folder
        return
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(folder, flags if links else flags | os.O_NOFOLLOW)
    try:
        yield _DESCRIPTORS / str(descriptor)
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return whether another process holds a lock on a file, as a connection of SQLite with a log does."""
    if sys.platform == "win32":
        return False
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in {errno.EACCES, errno.EAGAIN}  # others: a file system without locks
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def locked(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Keep other processes from entering or compacting the run at ``path`` meanwhile.

    The lock is the kernel's and on the folder itself: it leaves no file and ends with the process. Between
    machines such locks are unreliable: on network storage the process also creates :data:`CLAIM`.

    Raises
    ------
    RunWriteError
        If another process holds the lock for longer than ``timeout_s``. Who can read a directory can lock it,
        so that this stops no training run: it goes on unwatched, as where the disk refuses.
    """
    deadline = clock.monotonic() + timeout_s
    with _kernel_lock(path, deadline):
        if not on_network(path):
            yield
            return
        claim = path / CLAIM
        _create_claim(path, claim, deadline)
        try:
            yield
        finally:
            claim.unlink(missing_ok=True)


@contextlib.contextmanager
def _kernel_lock(path: Path, deadline: float) -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock.monotonic() > deadline:
                    msg = "another process is just opening or compacting this run, or locks it; try again"
                    raise RunWriteError(f"{path}: {msg}") from None
                clock.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def _create_claim(path: Path, claim: Path, deadline: float) -> None:
    text = codec.encode_row(ProcessIdentity.of_this_process()).encode("ascii")
    while True:
        try:
            # Creating a file that must not exist yet is atomic on network storage, too.
            descriptor = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            if _is_abandoned(claim):
                claim.unlink(missing_ok=True)
            elif clock.monotonic() > deadline:
                raise RunWriteError(
                    f"{path}: another process is just opening or compacting this run; try again, or remove "
                    f"{claim} if no other process uses the folder"
                ) from None
            else:
                clock.sleep(0.02)
            continue
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        return


def _is_abandoned(claim: Path) -> bool:
    """Return whether the process that created the claim ended without removing it."""
    try:
        age_s = clock.system_time() - claim.stat().st_mtime
        text = untrusted_files.read(claim, owners=untrusted_files.owners_beside(claim)).decode("ascii")
        alive = codec.convert(codec.decode(text), ProcessIdentity).alive()
    except (OSError, ValueError):
        return False  # it has just been removed, or is just being written
    return alive is False or (alive is None and age_s > STALE_CLAIM_S)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, uniquely; ``start`` is in clock ticks since boot, empty strings where unknown."""

    pid: Any = 0  # an int; damage reads as 0, and does not make the whole document unreadable
    host: str = ""
    boot: str = ""
    namespace: str = ""
    start: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.pid, int):
            object.__setattr__(self, "pid", 0)

    @classmethod
    def of_this_process(cls) -> Self:
        """Return the identity of the calling process."""
        pid = os.getpid()
        return cls(pid, socket.gethostname(), _boot(), _namespace(), _start(pid))

    def alive(self) -> bool | None:
        """Return whether the process lives, None where that cannot be determined from here."""
        if self.pid <= 0 or not self.host or self.host != socket.gethostname():
            return None
        boot = _boot()
        if self.boot and boot and self.boot != boot:
            return False
        if self.namespace != _namespace():
            return None
        return _exists(self.pid) and (not self.start or _start(self.pid) == self.start)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _start(pid: int) -> str:
    """Return the start in clock ticks since boot, empty where there is no process or a zombie.

    Not a wall-clock time: setting the clock must not end a living writer for readers.
    """
    process = processes.read_process(pid)
    return "" if process is None or process.is_dead else str(process.start)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
