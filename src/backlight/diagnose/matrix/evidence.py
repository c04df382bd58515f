"""Everything that can be had of a case while it still runs, in rising order of intrusion.

First what the kernel shows, then the stacks that a process under ``backlight run`` writes at a signal
(whose C handler runs also where the interpreter lock is held), then py-spy. Each step writes its own
file; a step that cannot be taken says why.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backlight.diagnose.matrix import processes, stacks
from backlight.diagnose.matrix.observations import Kept, Missing, Stack
from backlight.diagnose.matrix.processes import Process

SAMPLES = 3
"""Dumps of each process: whether a place is held shows only in more than one."""

BETWEEN = 0.3
"""Seconds between dumps."""

_PATIENCE = 20.0
"""Seconds that one call of py-spy may take."""

_ANSWER = 2.0
"""Seconds to wait for the answer to the signal."""


@dataclass
class Collection:
    """What was collected of one case: files go to ``folder``, their paths are told relative to ``root``."""

    folder: Path
    root: Path
    kept: list[Kept] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)

    def keep(self, name: str, text: str, what: str) -> None:
        """Write one file of evidence; where the disk refuses, that is said in its place."""
        path = self.folder / name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            self.missing.append(Missing(what, f"{path}: {error.strerror or error}"))
            return
        self.kept.append(Kept(path.relative_to(self.root).as_posix(), what))

    def lacks(self, what: str, why: str) -> None:
        """Record evidence that could not be collected, once."""
        entry = Missing(what, why)
        if entry not in self.missing:
            self.missing.append(entry)


def collect(collection: Collection, tree: Sequence[Process]) -> None:
    """Collect all evidence of the processes of a case into ``collection``; nothing is ended here."""
    _kernel(collection, tree)
    pythons = [p for p in tree if _is_python(p)]
    if not pythons:
        collection.lacks("Python stacks", "no process of the case is a Python interpreter")
        return
    _by_signal(collection, pythons)
    _by_pyspy(collection, pythons)


def _is_python(process: Process) -> bool:
    try:
        program = (Path("/proc") / str(process.pid) / "exe").readlink().name
    except OSError:
        program = process.name
    return program.startswith(("python", "pypy"))


def _kernel(collection: Collection, tree: Sequence[Process]) -> None:
    lines = []
    for process in tree:
        command = " ".join(processes.command_of(process.pid)) or process.name
        lines.append(
            f"{process.pid} parent {process.parent} session {process.session} state {process.state} "
            f"threads {process.threads} cpu {process.cpu:.2f} s: {command}"
        )
        lines += [f"    {wait}" for wait in processes.waits_of(process.pid)]
    collection.keep(
        "processes.txt", "\n".join(lines) + "\n", "process tree, with every thread's state and wait"
    )
    for process in tree:
        text = []
        for name in ("status", "io", "limits", "stack"):
            try:
                content = (Path("/proc") / str(process.pid) / name).read_text(
                    encoding="utf-8", errors="replace"
                )
            except OSError as error:
                collection.lacks(f"/proc/PID/{name}", error.strerror or str(error))
                continue
            text.append(f"== {name}\n{content}")
        collection.keep(f"proc-{process.pid}.txt", "\n".join(text), f"/proc state of process {process.pid}")


def _by_signal(collection: Collection, pythons: Sequence[Process]) -> None:
    for process in pythons:
        what = f"stacks by signal of process {process.pid}"
        if any(processes.SIDECAR in part for part in processes.command_of(process.pid)):
            continue
        if not processes.catches(process.pid, processes.DUMP_SIGNAL):
            collection.lacks(what, "no handler is installed there; `backlight run` installs one")
            continue
        texts = []
        for sample in range(SAMPLES):
            text = _dump(process)
            if not text:
                collection.lacks(what, f"no answer in a file within {_ANSWER:g} s")
                break
            texts.append(text)
            collection.stacks += stacks.from_faulthandler(text, process.pid, sample)
            time.sleep(BETWEEN)
        if texts:
            whole = "\n".join(f"== dump {i + 1}\n{text}" for i, text in enumerate(texts))
            collection.keep(f"stacks-signal-{process.pid}.txt", whole, what)


def _dump(process: Process) -> str:
    """Return what the process appended to one of its open files after the signal, empty without answer."""
    before = {path: _size(path) for path in _files(process.pid)}
    if not processes.send(process, processes.DUMP_SIGNAL):
        return ""
    deadline = time.monotonic() + _ANSWER
    text, last = "", ""
    while time.monotonic() < deadline:
        time.sleep(0.05)
        # The dump is over when nothing was added since the last look.
        if text and text == last:
            return text
        last = text
        for path in _files(process.pid):
            start = before.get(path, 0)
            if _size(path) > start:
                added = _read_from(path, start)
                if "(most recent call first)" in added:
                    text = added
                    break
    return text


def _files(pid: int) -> list[Path]:
    folder = Path("/proc") / str(pid) / "fd"
    found = []
    try:
        entries = list(folder.iterdir())
    except OSError:
        return []
    for entry in entries:
        try:
            if stat.S_ISREG(entry.stat().st_mode):
                found.append(entry)
        except OSError:
            continue
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""


def pyspy() -> str | None:
    """Return py-spy's program, beside this Python or on the path; None where it is not installed."""
    return shutil.which(
        "py-spy", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    )


def _by_pyspy(collection: Collection, pythons: Sequence[Process]) -> None:
    program = pyspy()
    if program is None:
        collection.lacks("Python and native stacks by py-spy", "not installed: pip install py-spy")
        return
    for process in pythons:
        what = f"stacks by py-spy of process {process.pid}"
        texts = []
        for sample in range(SAMPLES):
            # The last one also reads native frames, which pauses the process for longest.
            native = sample == SAMPLES - 1
            how = ["--native"] if native else ["--nonblocking"]
            text, why = _ask(program, process.pid, how)
            if not text and why and native:
                text, _ = _ask(program, process.pid, [])
                collection.lacks(f"native {what}", why)
            try:
                found = stacks.from_pyspy(text, sample) if text else ()
            except ValueError as error:
                found, why = (), str(error)
            if found:
                texts.append(text)
                collection.stacks += found
            elif not native:
                collection.lacks(what, why)
                if "ermission" in why or "ptrace" in why:
                    break
            time.sleep(BETWEEN)
        if texts:
            collection.keep(f"stacks-py-spy-{process.pid}.json", "[" + ",\n".join(texts) + "]\n", what)


def _ask(program: str, pid: int, how: Sequence[str]) -> tuple[str, str]:
    """Return what py-spy printed, and why not."""
    try:
        done = subprocess.run(
            [program, "dump", "--json", *how, "--pid", str(pid)],
            capture_output=True, text=True, errors="replace", timeout=_PATIENCE, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"py-spy did not answer in {_PATIENCE:g} s"
    except OSError as error:
        return "", f"{program}: {error.strerror}"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return "", " ".join(lines[:2]) or f"exit code {done.returncode}"
    return done.stdout, ""
