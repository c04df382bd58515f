"""Several runs of one experiment: over seeds and settings, one folder and one process each."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from backlight.experiments.config import ConfigurationError
from backlight.text import assignment


@dataclass(frozen=True)
class Member:
    """One run of a sweep: its folder and the options that make it differ from the others."""

    folder: Path
    options: tuple[str, ...]


def seeds(text: str) -> list[int]:
    """Return the seeds of ``"0-4"``, ``"0,1,7"`` or both mixed.

    Raises
    ------
    ConfigurationError
        If the text has another form.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ConfigurationError(f"--seeds {text!r}: expected seeds such as 0-4 or 0,1,7")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return list(dict.fromkeys(found))


def members(root: Path, chosen: Sequence[int], sweeps: Iterable[str]) -> list[Member]:
    """Return every combination of seeds and of ``key=value,value`` sweeps, each with its own folder.

    Raises
    ------
    ConfigurationError
        If a sweep has another form.
    """
    axes: list[list[tuple[str, str]]] = []
    for item in sweeps:
        example = "key=value,value, such as training.lr=0.001,0.01"
        key, values = assignment(item, "--sweep", example, ConfigurationError)
        if not all(values.split(",")):
            raise ConfigurationError(f"--sweep {item!r}: expected {example}")
        axes.append([(key, value) for value in values.split(",")])
    out = []
    every: Sequence[int | None] = chosen or [None]
    for seed in every:
        for changes in itertools.product(*axes):
            name = [f"{key.rsplit('.', maxsplit=1)[-1]}-{value}" for key, value in changes]
            options = [option for key, value in changes for option in ("--set", f"{key}={value}")]
            if seed is not None:
                name.append(f"seed-{seed}")
                options += ["--seed", str(seed)]
            out.append(Member(root / _safe("-".join(name) or "run"), tuple(options)))
    return out


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def together(jobs: int | None, runs: int, threads: int) -> int:
    """Return how many runs go side by side: as many as cores allow with their threads, or ``jobs``."""
    return max(1, min(runs, jobs if jobs is not None else cores() // max(1, threads)))


def command(arguments: Sequence[str], member: Member) -> list[str]:
    """Return the command line of one run of a sweep."""
    return [
        sys.executable,
        "-m",
        "backlight",
        "grok",
        "run",
        *arguments,
        *member.options,
        "--out",
        str(member.folder),
    ]


def run_all(
    commands: Sequence[tuple[Path, Sequence[str]]],
    *,
    side_by_side: int,
    threads: int,
    on_end: Callable[[Path, int], None],
) -> int:
    """Run every command, some side by side, each with its output in ``FOLDER.log``; return how many failed.

    Raises
    ------
    KeyboardInterrupt
        On Ctrl-C, when they have ended as well; each goes on with ``--resume`` later.
    """
    waiting, running, failed = list(commands), list[tuple[Path, subprocess.Popen[bytes]]](), 0
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    try:
        while waiting or running:
            while waiting and len(running) < side_by_side:
                folder, line = waiting.pop(0)
                folder.parent.mkdir(parents=True, exist_ok=True)
                with folder.with_name(f"{folder.name}.log").open("wb") as log:
                    process = subprocess.Popen(line, stdout=log, stderr=log, env=environment)
                running.append((folder, process))
            for entry in list(running):
                folder, process = entry
                if process.poll() is not None:
                    running.remove(entry)
                    failed += process.returncode != 0
                    on_end(folder, process.returncode)
            time.sleep(0.1)
    except KeyboardInterrupt:
        for _, process in running:
            process.wait()
        raise
    return failed


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", name)
