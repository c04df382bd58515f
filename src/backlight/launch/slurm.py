"""A watched run as one job of a Slurm cluster: torchrun on each node, one run directory for all ranks.

The same plan becomes a job of submitit or a batch script. Slurm starts one torchrun per node; the ranks
meet on the first node, share one run id and write one run directory. A job that Slurm requeues gets the
next run id, and so becomes a new attempt of the same run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backlight import atomic_files
from backlight.distributed import JOB_SEPARATOR, slurm_restarts
from backlight.text import assignments

_OWN = ("cluster", "nodes", "nproc_per_node", "max_restarts", "setup", "time", "timeout_min", "name")
_REFUSED = {"ntasks", "tasks_per_node", "ntasks_per_node"}
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_PORTS = (20000, 20000)
"""First port and number of ports among which the number of the job chooses where the ranks meet."""

GRACE_S = 30.0
"""Seconds that torchrun has to end when its job is requeued, as Slurm itself waits."""


ENDED = "torchrun ended"
"""How the message of a failed job begins."""


class ClusterError(ValueError):
    """A job that cannot be created or submitted; the message names the reason and an alternative."""


def parameters(items: Iterable[str]) -> dict[str, Any]:
    """Return the parameters of ``key=value`` items."""
    example = "key=value, such as partition=gpu or cluster=local"
    return {
        key.lstrip("-").replace("-", "_"): int(value) if value.isdigit() else value
        for key, value in assignments(items, "--slurm", example, ClusterError).items()
    }


_NAMES = {"timeout_min": "time", "mem_gb": "mem", "name": "job-name"}
"""Our names of options of sbatch, where they differ by more than underscores."""


def require(cluster: str | None) -> None:
    """Check that jobs can be submitted from this machine; ``"local"`` runs them here."""
    if cluster not in {None, "slurm", "local"}:
        raise ClusterError(f"--slurm cluster={cluster}: expected slurm, which is the default, or local")
    if cluster != "local" and shutil.which("sbatch") is None:
        raise ClusterError(
            "--slurm: sbatch is not on the path, so this machine submits to no Slurm cluster; "
            "--slurm-script FILE writes the batch script to take there, --slurm cluster=local runs the job "
            "here"
        )


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
    local: bool = False
    directives: dict[str, Any] = field(default_factory=dict)

    @property
    def logs(self) -> Path:
        """Directory for the output of the job, next to the run directory."""
        return self.out.with_name(f"{self.out.name}.slurm")

    @classmethod
    def of(cls, given: dict[str, Any], command: Sequence[str], out: Path) -> Job:
        """Return the job of the parameters of ``--slurm``."""
        for key in sorted(_REFUSED & given.keys()):
            raise ClusterError(
                f"--slurm {key}={given[key]}: Slurm starts one torchrun per node, and that starts the "
                "ranks; give nproc_per_node, or gpus_per_node for one rank per GPU"
            )
        per_node = given.get("nproc_per_node", _gpus(given.get("gpus_per_node", 1)))
        limit = given.get("timeout_min", given.get("time"))
        numbers = {"nodes": given.get("nodes", 1), "nproc_per_node": per_node}
        numbers["max_restarts"] = given.get("max_restarts", 0)
        for key, value in numbers.items():
            least = int(key != "max_restarts")
            if not isinstance(value, int) or value < least:
                raise ClusterError(f"--slurm {key}={value}: expected a whole number, at least {least}")
        local = given.get("cluster") == "local"
        if local and numbers["nodes"] > 1:
            raise ClusterError(
                f"--slurm cluster=local nodes={numbers['nodes']}: one machine is one node; "
                "give nproc_per_node for more ranks"
            )
        return cls(
            name=str(given.get("name", out.name)),
            command=tuple(command),
            out=out,
            nodes=numbers["nodes"],
            per_node=numbers["nproc_per_node"],
            minutes=None if limit is None else minutes_of(limit),
            restarts=numbers["max_restarts"],
            setup=str(given.get("setup", "")),
            local=local,
            directives={key: value for key, value in given.items() if key not in _OWN},
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


def submit(job: Job) -> Any:
    """Submit the job through submitit and return its handle."""
    require("local" if job.local else None)
    import submitit  # noqa: PLC0415 - an optional library

    if "signal" in job.directives:
        raise ClusterError(
            "--slurm signal=...: submitit sends a signal of its own before the limit, and requeues the job; "
            "leave it out, or write the batch script with --slurm-script FILE"
        )
    known: dict[str, Any] = {"name": job.name, "nodes": job.nodes, "tasks_per_node": 1}
    if job.minutes is not None:
        known["timeout_min"] = job.minutes
    if job.local:
        known |= {key: job.directives[key] for key in ("gpus_per_node",) if key in job.directives}
    else:
        known["slurm_additional_parameters"] = {
            ("mem" if key == "mem_gb" else key): (f"{value}G" if key == "mem_gb" else value)
            for key, value in job.directives.items()
        }
        known["slurm_setup"] = [job.setup] if job.setup else []
    job.logs.mkdir(parents=True, exist_ok=True)
    try:
        executor = submitit.AutoExecutor(folder=job.logs, cluster="local" if job.local else "slurm")
        executor.update_parameters(**known)
        return executor.submit(NodeJob(job))
    except (NameError, RuntimeError, ValueError, TypeError, submitit.core.utils.FailedJobError) as error:
        raise ClusterError(
            f"--slurm: the job cannot be submitted: {error}; --slurm-script FILE writes the batch script"
        ) from error


class NodeJob:
    """What submitit pickles and runs on every node: one torchrun."""

    def __init__(self, job: Job, starts: int = 0) -> None:
        self.job = job
        self.starts = starts

    def __call__(self) -> None:
        """Run torchrun to its end."""
        import submitit  # noqa: PLC0415 - an optional library

        here = submitit.JobEnvironment()
        number = int("".join(filter(str.isdigit, here.job_id)) or 0)
        restarts = slurm_restarts()
        host = here.hostnames[0] if here.num_nodes > 1 else "localhost"
        line = torchrun(
            self.job,
            identifier=here.job_id,
            endpoint=f"{host}:{_PORTS[0] + number % _PORTS[1]}",
            is_host=str(int(here.node == 0)),
        )
        identifier = (
            f"{here.cluster}-{here.job_id}{JOB_SEPARATOR}{self.starts if restarts is None else restarts}"
        )
        process = subprocess.Popen(line, env={**os.environ, "BACKLIGHT_RUN_ID": identifier})
        try:
            code = process.wait()
        finally:
            # On a requeue submitit leaves this process by SystemExit: the ranks end before it does.
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        if code:
            raise RuntimeError(f"{ENDED} with exit code {code}")

    def checkpoint(self) -> Any:
        """Return what goes on when the job is requeued: the same command, as the next attempt."""
        import submitit  # noqa: PLC0415 - an optional library

        return submitit.helpers.DelayedSubmission(NodeJob(self.job, self.starts + 1))


def _gpus(given: int | str) -> int | str:
    """Return the number of ``gpus_per_node=8`` or ``gpus_per_node=a100:8``."""
    last = str(given).rsplit(":", maxsplit=1)[-1]
    return int(last) if last.isdigit() else given
