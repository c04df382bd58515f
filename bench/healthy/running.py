"""Runs of public programs: a copy with its data, the environment, and an end after some processor time."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from healthy import data, pretrained
from healthy.programs import Program

ENDING_S = 120.0
"""Time that a program has to end after SIGINT."""

WALL_FACTOR = 6.0
"""Times its processor time that a program may take, waits for a busy machine included."""

POLL_S = 0.5


OFFLINE = {
    "MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
"""Settings of libraries that would open a window or a connection."""


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment of a program: modules of its folder first, data sets and models from files."""
    return {
        **os.environ,
        **OFFLINE,
        "PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parent / 'offline'}",
        "TORCH_HOME": str(folder / "torch-home"),
        "HF_HOME": str(folder / "hf-home"),
    }


def clone_of(program: Program, clones: Path) -> Path:
    """Return the clone of a program's repository, made where it is missing."""
    folder = clones / program.repository.partition("/")[2]
    if not folder.is_dir():
        url = f"https://github.com/{program.repository}"
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", url, str(folder)], check=True)
    return folder


def prepared(program: Program, clones: Path, work: Path) -> tuple[Path, Path]:
    """Copy the repository, write the data; return working directory and script."""
    root = work / program.name.replace(" ", "-").replace(",", "") / "code"
    shutil.rmtree(root.parent, ignore_errors=True)
    shutil.copytree(clone_of(program, clones), root, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    script = root / program.script
    for place, generator in program.data.items():
        (data.GENERATORS | pretrained.GENERATORS)[generator]((script.parent / place).resolve())
    folder = root / program.folder if program.folder else script.parent
    return folder, script


def execute(
    command: Sequence[str], folder: Path, environment: dict[str, str], seconds: float
) -> tuple[int, str]:
    """Run a command, interrupted after some processor time; return its exit code and its last line."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        end = time.monotonic() + WALL_FACTOR * seconds
        while child.poll() is None and time.monotonic() < end and processor_time(child.pid) < seconds:
            time.sleep(POLL_S)
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
        try:
            child.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.strip()]
    return child.returncode, lines[-1] if lines else ""


def processor_time(process: int) -> float:
    """Return the processor seconds of a process and of its children that run."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process)
        for each in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total += times.user + times.system
    return total
