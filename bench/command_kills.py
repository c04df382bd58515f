"""Kill commands that write at random moments: what they read is unchanged, what they wrote whole or absent.

Each command of ``COMMANDS`` runs once to its end, for its time and the files that it leaves, then
again and again in a fresh copy of its input, killed (SIGKILL) at a random moment of that time, and once more
after the kill: then it must leave the files that it leaves alone. A kill may leave only files under
temporary names that begin with a dot. Of `run --resume`, every step that was flushed must be there.

    python bench/command_kills.py --kills 100
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kills import digest
from rich.console import Console
from rich.table import Table

import backlight
from backlight.records import RunStatus

sys.path.remove(str(Path(__file__).parent))  # it has another `report`
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fuzz.targets import write_seeds

SCRIPT = """
import torch
from torch import nn
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
"""

LEFT_OUT = ("left no data, it ended before its first flush", "left no file")
"""Ends of what a run states where a kill came before the first flush, or before a part was joined."""


@dataclass(frozen=True)
class Command:
    """Arguments, the files that may change, and whether their bytes are the same each time."""

    arguments: tuple[str, ...]
    writes: tuple[str, ...]
    reproducible: bool = True


COMMANDS = {
    "join": Command(("join", "host0", "host1"), ("host0/",)),
    "export, csv": Command(("export", "run", "out.csv"), ("out.",)),
    "export, parquet": Command(("export", "run", "out.parquet"), ("out.",)),
    "export, HDF5": Command(("export", "run", "out.h5"), ("out.",), reproducible=False),
    "report": Command(("report", "run", "-o", "page.html"), ("page.html",), reproducible=False),
    "report, bundle": Command(("report", "run", "--bundle", "run.zip"), ("run.zip",), reproducible=False),
    "compact": Command(("compact", "run"), ("run/",), reproducible=False),
    "run --resume": Command(
        ("run", "--resume", "--quiet", "--out", "trained", "train.py"), ("trained/",), reproducible=False
    ),
}


def started(arguments: Sequence[str], folder: Path) -> int:
    """Run a command of backlight in a forked child, without its output; return the process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.chdir(folder)
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silent, descriptor)
        sys.argv = ["backlight", *arguments]
        from backlight.cli.app import main

        with contextlib.suppress(SystemExit):
            main()
        code = 0
    finally:
        os._exit(code)


def outputs(command: Command, folder: Path) -> dict[str, str]:
    """Return the hashes of what a command may write, without temporary files."""
    files = digest(folder).items()
    return {
        name: hashed for name, hashed in files if name.startswith(command.writes) and not _is_temporary(name)
    }


def inputs(command: Command, folder: Path) -> dict[str, str]:
    """Return the hashes of what a command may not change."""
    return {name: hashed for name, hashed in digest(folder).items() if not name.startswith(command.writes)}


def _is_temporary(name: str) -> bool:
    return Path(name).name.startswith(".")


def problems(
    name: str, folder: Path, before: dict[str, str], whole: dict[str, str], *, ended: bool
) -> list[str]:
    """Return what is wrong in a folder after a kill, or after the command ``ended``."""
    command, wrong = COMMANDS[name], []
    now = {file: hashed for file, hashed in inputs(command, folder).items() if not _is_temporary(file)}
    if now != before:
        wrong.append(f"what it may not write was changed: {sorted(set(now.items()) ^ set(before.items()))}")
    found = outputs(command, folder)
    if not ended and not (folder / command.writes[0]).exists():
        return wrong  # killed before it wrote anything
    if command.writes[0].endswith("/"):  # a run
        run = backlight.open_run(folder / command.writes[0])
        wrong += [loss for loss in run.losses if "was killed" not in loss and not loss.endswith(LEFT_OUT)]
        if ended and run.status is not RunStatus.FINISHED:
            wrong.append(f"status {run.status}")
    elif found and command.reproducible and found != whole:
        wrong.append(f"half-written: {sorted(found)}")
    elif found and not command.reproducible:
        wrong += [f"{file}: is damaged" for file in found if not _is_readable(folder / file)]
    if ended and set(found) < set(whole):
        wrong.append(f"after a second try {sorted(set(whole) - set(found))} are missing")
    return wrong


def _is_readable(file: Path) -> bool:
    if file.suffix == ".html":
        return file.read_text(encoding="utf-8").rstrip().endswith("</html>")
    if file.suffix == ".zip":
        import zipfile

        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    import h5py

    with h5py.File(file) as opened:
        return bool(len(opened))


def kill(name: str, seeds: Path, kills: int, source: random.Random) -> tuple[int, list[str]]:
    """Kill one command; return how often it was killed before its end, and what was wrong."""
    command, wrong, killed = COMMANDS[name], [], 0
    with tempfile.TemporaryDirectory(prefix="backlight-kills-") as base:

        def fresh(number: int) -> Path:
            return Path(shutil.copytree(seeds, Path(base) / str(number)))

        folder = fresh(0)
        before = inputs(command, folder)
        began = time.monotonic()
        _, status = os.waitpid(started(command.arguments, folder), 0)
        seconds, whole = time.monotonic() - began, outputs(command, folder)
        if status or not whole:
            return 0, [f"failed without a kill: {status}"]
        for number in range(1, kills + 1):
            folder = fresh(number)
            pid = started(command.arguments, folder)
            time.sleep(source.uniform(0.0, seconds))
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            killed += os.WIFSIGNALED(status)
            wrong += [f"kill {number}: {what}" for what in problems(name, folder, before, whole, ended=False)]
            again = (
                [*command.arguments, "--overwrite"] if command.arguments[0] == "export" else command.arguments
            )
            os.waitpid(started(again, folder), 0)
            wrong += [
                f"after kill {number}: {what}" for what in problems(name, folder, before, whole, ended=True)
            ]
            shutil.rmtree(folder)
    return killed, wrong


def kill_commands(
    kills: int, seed: int = 0, names: Sequence[str] = tuple(COMMANDS)
) -> dict[str, tuple[int, list[str]]]:
    """Kill each command ``kills`` times; return how often before its end, and what was wrong, by name."""
    import torch  # noqa: F401 - the children need it

    import backlight.cli.app  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="backlight-kills-") as base:
        seeds = Path(base) / "seeds"
        seeds.mkdir()
        for extra in write_seeds(seeds).iterdir():
            if extra.name not in {"run", "host0", "host1"}:
                shutil.rmtree(extra) if extra.is_dir() else extra.unlink()
        (seeds / "train.py").write_text(SCRIPT)
        source = random.Random(seed)
        return {name: kill(name, seeds, kills, source) for name in names}


def main() -> int:
    """Print how often each command was killed, and what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(COMMANDS), choices=COMMANDS)
    options = parser.parse_args()
    found = kill_commands(options.kills, options.seed, options.only)
    table = Table("command", "killed before its end", "failed", box=None)
    console = Console()
    for name, (killed, wrong) in found.items():
        table.add_row(name, f"{killed} of {options.kills}", str(len(wrong)))
        for what in wrong[:5]:
            console.print(f"{name}: {what}", style="red")
    console.print(table)
    return 1 if any(wrong for _, wrong in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
