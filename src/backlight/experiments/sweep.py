"""Several runs of one experiment, over seeds and settings: as processes here, tasks of Ray or Slurm jobs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backlight import atomic_files, devices
from backlight.experiments.config import Configuration, ConfigurationError
from backlight.experiments.cost import choose, estimate_of
from backlight.launch.ray_tasks import RayOptions, run_tasks
from backlight.launch.slurm import sbatch_lines
from backlight.launch.subprocess import run_in_own_session
from backlight.monitors.grokking.model.measures import TIERS
from backlight.processes import available_cores
from backlight.text import assignment
from backlight.threads import executor


@dataclass(frozen=True)
class Member:
    """One run of a sweep: its run directory and the options in which it differs from the others."""

    directory: Path
    options: tuple[str, ...]


def seeds(text: str) -> list[int]:
    """Return the seeds of ``"0-4"``, ``"0,1,7"`` or a mixture."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ConfigurationError(f"--seeds {text!r}: expected seeds such as 0-4 or 0,1,7")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return list(dict.fromkeys(numbers))


def members(root: Path, chosen: Sequence[int], sweeps: Iterable[str]) -> list[Member]:
    """Return every combination of seeds and ``key=value,value`` sweeps, each with its own run directory."""
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


def concurrent_runs(jobs: int | None, runs: int, threads: int) -> int:
    """Return the number of concurrent runs: ``jobs``, or as many as the cores allow with their threads."""
    return max(1, min(runs, jobs if jobs is not None else available_cores() // max(1, threads)))


def command(arguments: Sequence[str], member: Member) -> list[str]:
    """Return the command line of one run of a sweep."""
    program = [sys.executable, "-m", "backlight", "grok", "run"]
    return [*program, *arguments, *member.options, "--out", str(member.directory)]


def run_all(
    commands: Sequence[tuple[Path, Sequence[str]]],
    *,
    concurrent: int,
    threads: int,
    on_end: Callable[[Path, int], None],
) -> int:
    """Run every command, several at a time, each with its output in ``DIRECTORY.log``; return the failures.

    Raises
    ------
    KeyboardInterrupt
        On Ctrl-C, once the running ones have ended; each can be continued with ``--resume``.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}

    def run(directory: Path, line: Sequence[str]) -> int:
        directory.parent.mkdir(parents=True, exist_ok=True)
        path = directory.with_name(f"{directory.name}.log")
        path.unlink(missing_ok=True)
        with atomic_files.open_log(path) as log:
            return subprocess.run(line, stdout=log, stderr=log, env=environment, check=False).returncode

    failed = 0
    with executor(concurrent) as pool:
        jobs = {pool.submit(run, directory, line): directory for directory, line in commands}
        try:
            for job in as_completed(jobs):
                failed += job.result() != 0
                on_end(jobs[job], job.result())
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def run_on_ray(
    commands: Sequence[tuple[Path, Sequence[str]]],
    options: RayOptions,
    *,
    threads: int,
    on_end: Callable[[Path, int], None],
) -> int:
    """Run every command as a task of Ray, with its output in ``DIRECTORY.log``; return the failures.

    The nodes need the directories, on storage that they share, and backlight.
    """
    calls = [(directory.absolute(), tuple(line), threads) for directory, line in commands]
    failed = 0
    for index, result in run_tasks(_run_task, calls, options):
        failed += result is not None
        on_end(commands[index][0], int(result is not None))
    return failed


def _run_task(directory: Path, line: Sequence[str], threads: int) -> None:
    """Run one command; a repeated task goes on with the run that the earlier one began."""
    is_begun = (directory / "manifest.json").exists() and "--resume" not in line
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    directory.parent.mkdir(parents=True, exist_ok=True)
    with atomic_files.open_log(directory.with_name(f"{directory.name}.log")) as log:
        # Where the task is cancelled, nothing that it has started goes on.
        done = run_in_own_session(
            [sys.executable, *line[1:], *(["--resume"] if is_begun else [])],
            limit=None, stdout=log.fileno(), stderr=log.fileno(), environment=environment,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"ended with exit code {done.returncode}; see {directory}.log")


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", name)


SLACK = 1.5
"""Requested over estimated time and memory."""


_SAME = (("timeout_min", "time"), ("mem_gb", "mem", "mem_per_cpu", "mem_per_gpu"), ("cpus_per_task",),
         ("gpus_per_node", "gpus", "gpus_per_task", "gres"))  # fmt: skip
"""Options of sbatch that request the same; where one is given, ours is left out."""


def job_parameters(
    parameters: Mapping[str, Any], configuration: Configuration, root: Path, *, degrade: bool
) -> tuple[dict[str, Any], str]:
    """Return the parameters, with time, memory, cores and GPU of the run unless given, and a note.

    Time and memory are estimated by timing a few steps, unless both are given. A device that this machine
    lacks is stood for by the host, which the note states; whether the run fits is then found on the node.
    """
    needed: dict[str, Any] = {
        "name": f"grok-{configuration.experiment}", "cpus_per_task": configuration.run.threads,
    }  # fmt: skip
    note = ""
    if not all(parameters.keys() & same for same in _SAME[:2]):
        is_here = torch.device(configuration.device).type in devices.types()
        timed = configuration if is_here else dataclasses.replace(configuration, device="cpu")
        costs = estimate_of(timed, root, budget=1.0)
        tier = choose(costs, degrade=degrade).tier if is_here else TIERS[0]
        needed["timeout_min"] = 5 + math.ceil(SLACK * costs.seconds(tier) / 60)
        needed["mem_gb"] = max(1, math.ceil(SLACK * costs.memory(tier) / 1e9))
        if not is_here:
            note = (
                f"device {configuration.device!r} is not on this machine: time and memory of the job are "
                "those of its processor; set them by --slurm timeout_min=60 --slurm mem_gb=16"
            )
    if torch.device(configuration.device).type != "cpu":
        needed["gpus_per_node"] = 1
    for key, *others in _SAME:
        if parameters.keys() & others:
            needed.pop(key, None)
    return {**needed, **parameters}, note


def batch_script(parameters: Mapping[str, Any], commands: Sequence[Sequence[str]], logs: Path) -> str:
    """Return a batch script; several commands are one job array, one task each."""
    lines = ["#!/bin/bash", *sbatch_lines(parameters)]
    array = len(commands) > 1
    lines += sbatch_lines({"output": f"{logs}/%{'A_%a' if array else 'j'}.out"})
    if not array:
        return "\n".join([*lines, "", shlex.join(commands[0]), ""])
    lines.append(f"#SBATCH --array=0-{len(commands) - 1}")
    cases = [f"  {i}) {shlex.join(line)} ;;" for i, line in enumerate(commands)]
    return "\n".join([*lines, "", 'case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac", ""])
