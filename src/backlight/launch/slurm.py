"""A watched run as one job of a Slurm cluster: torchrun on each node, one run directory for all ranks.

The plan becomes a batch script. Slurm starts one torchrun per node; the ranks
meet on the first node, share one run id and write one run directory. A job that Slurm requeues gets the
next run id, and so becomes a new attempt of the same run.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backlight import atomic_files
from backlight.distributed import JOB_SEPARATOR
from backlight.text import assignments

_OWN = ("nodes", "nproc_per_node", "max_restarts", "setup", "time", "timeout_min", "name")
_REFUSED = {"ntasks", "tasks_per_node", "ntasks_per_node"}
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_PORTS = (20000, 20000)
"""First port and number of ports among which the number of the job chooses where the ranks meet."""


class ClusterError(ValueError):
    """A job that cannot be created; the message names the reason and an alternative."""


def parameters(items: Iterable[str]) -> dict[str, Any]:
    """Return the parameters of ``key=value`` items."""
    example = "key=value, such as partition=gpu"
    return {
        key.lstrip("-").replace("-", "_"): int(value) if value.isdigit() else value
        for key, value in assignments(items, "--slurm", example, ClusterError).items()
    }


_NAMES = {"timeout_min": "time", "mem_gb": "mem", "name": "job-name"}
"""Our names of options of sbatch, where they differ by more than underscores."""


@dataclass(frozen=True)
class Job:
    """A watched torchrun job: what torchrun starts on ``per_node`` ranks of each node, writing into ``out``.

    ``minutes`` is None where the cluster sets the limit, ``setup`` a shell command that runs before
    torchrun on every node, ``directives`` further options of sbatch.
    """

    name: str
    command: tuple[str, ...]
    out: Path
    nodes: int = 1
    per_node: int = 1
    minutes: int | None = None
    restarts: int = 0
    setup: str = ""
    directives: dict[str, Any] = field(default_factory=dict)

    @property
    def logs(self) -> Path:
        """Directory for the output of the job, next to the run directory."""
        return self.out.with_name(f"{self.out.name}.slurm")

    @classmethod
    def of(cls, parameters: dict[str, Any], command: Sequence[str], out: Path) -> Job:
        """Return the job of the parameters of ``--slurm``."""
        for key in sorted(_REFUSED & parameters.keys()):
            raise ClusterError(
                f"--slurm {key}={parameters[key]}: Slurm starts one torchrun per node, and that starts the "
                "ranks; give nproc_per_node, or gpus_per_node for one rank per GPU"
            )
        per_node = parameters.get("nproc_per_node", _gpus(parameters.get("gpus_per_node", 1)))
        limit = parameters.get("timeout_min", parameters.get("time"))
        numbers = {"nodes": parameters.get("nodes", 1), "nproc_per_node": per_node}
        numbers["max_restarts"] = parameters.get("max_restarts", 0)
        for key, value in numbers.items():
            least = int(key != "max_restarts")
            if not isinstance(value, int) or value < least:
                raise ClusterError(f"--slurm {key}={value}: expected a whole number, at least {least}")
        return cls(
            name=str(parameters.get("name", out.name)),
            command=tuple(command),
            out=out,
            nodes=numbers["nodes"],
            per_node=numbers["nproc_per_node"],
            minutes=None if limit is None else minutes_of(limit),
            restarts=numbers["max_restarts"],
            setup=str(parameters.get("setup", "")),
            directives={key: value for key, value in parameters.items() if key not in _OWN},
        )


def minutes_of(limit: int | str) -> int:
    """Return minutes, rounded up, from ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M`` or ``D-H:M:S``."""
    text = str(limit)
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    seconds = 0
    if match is not None:
        days, first, second, third = (0 if part is None else int(part) for part in match.groups())
        if match[1] is not None:
            seconds = 86400 * days + 3600 * first + 60 * second + third
        elif match[4] is not None:
            seconds = 3600 * first + 60 * second + third
        else:
            seconds = 60 * first + second
    if not seconds:
        raise ClusterError(f"--slurm time={text}: expected minutes, H:MM:SS or D-HH:MM:SS, as for sbatch")
    return -(-seconds // 60)


def torchrun(job: Job, *, identifier: str, endpoint: str, is_host: str) -> list[str]:
    """Return the command line of one node; what is only known there comes as text."""
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.per_node}",
        f"--max-restarts={job.restarts}",
        f"--rdzv-id={identifier}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-conf=is_host={is_host}",
    ]
    if "signal" in job.directives:
        name = str(job.directives["signal"]).split("@", maxsplit=1)[0].split(":")[-1]
        line.append(f"--signals-to-handle={_SIGNALS},SIG{name.removeprefix('SIG')}")
    return [*line, *job.command]


def sbatch_lines(options: Mapping[str, Any]) -> list[str]:
    """Return the options of sbatch as lines of a script; sbatch takes quotes apart as a shell does."""
    lines = []
    for key, value in options.items():
        shown = f"{value}G" if key == "mem_gb" else str(value)
        lines.append(f"#SBATCH --{_NAMES.get(key, key.replace('_', '-'))}={shlex.quote(shown)}")
    return lines


def script_for(path: Path | None) -> Path:
    """Return the path of the batch script; a ClusterError without one."""
    if path is None:
        raise ClusterError(
            "--slurm sets options of a batch script: add --slurm-script FILE, which writes it, and submit it "
            "with `sbatch FILE`"
        )
    return path


def write_script(path: Path, text: str, logs: Path) -> None:
    """Write a batch script, then the folder of its logs."""
    try:
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise ClusterError(
                f"--slurm-script {path}: exists with other content; remove it, or give another name"
            )
        atomic_files.write(path, text.encode(), 0o700)  # the command in it may hold secrets
    except OSError as error:
        raise ClusterError(f"--slurm-script {path}: cannot be written: {error.strerror or error}") from error
    logs.mkdir(parents=True, exist_ok=True)  # sbatch makes none


def batch_script(job: Job) -> str:
    """Return the batch script of the job."""
    directives: dict[str, Any] = {
        "job_name": job.name,
        "nodes": job.nodes,
        "ntasks_per_node": 1,
        "output": f"{job.logs}/%j.out",
        "open_mode": "append",
    }
    if job.minutes is not None:
        directives["time"] = job.minutes
    lines = ["#!/bin/bash", *sbatch_lines(directives | job.directives)]
    first, count = _PORTS
    parts = torchrun(
        job, identifier='"$SLURM_JOB_ID"', endpoint='"$BACKLIGHT_ENDPOINT"', is_host="$((SLURM_NODEID == 0))"
    )
    # What is only known on the node is for its shell to fill in; the rest is quoted.
    inner = " ".join(part if part.startswith("--rdzv-") else shlex.quote(part) for part in parts)
    setup = f"{job.setup} && " if job.setup else ""
    return "\n".join(
        [
            *lines,
            "#SBATCH --requeue",
            "",
            "# One id for all ranks. A requeued job counts on, and is a new attempt of the same run.",
            f'export BACKLIGHT_RUN_ID="slurm-${{SLURM_JOB_ID}}{JOB_SEPARATOR}${{SLURM_RESTART_COUNT:-0}}"',
            "# The ranks meet on the first node.",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f'export BACKLIGHT_ENDPOINT="$first:$(({first} + SLURM_JOB_ID % {count}))"',
            "",
            "# One torchrun per node; exec hands signals of Slurm on to it, and it to the ranks.",
            f"exec srun --kill-on-bad-exit=1 bash -c {shlex.quote(f'{setup}exec {inner}')}",
            "",
        ]
    )


def _gpus(gpus: int | str) -> int | str:
    """Return the number of ``gpus_per_node=8`` or ``gpus_per_node=a100:8``."""
    last = str(gpus).rsplit(":", maxsplit=1)[-1]
    return int(last) if last.isdigit() else gpus
