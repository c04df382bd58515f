"""Runs as jobs of a cluster, through submitit; memory, time and GPU come from the estimate."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backlight.experiments.config import Configuration
from backlight.launch.slurm import ClusterError, require, sbatch_lines

if TYPE_CHECKING:
    from backlight.experiments.cost_estimate import Estimate

_OWN = ("timeout_min", "mem_gb", "nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "name")

SLACK = 1.5
"""Time and memory are asked for with this factor over the estimate."""


def filled_in(
    given: Mapping[str, Any], configuration: Configuration, found: Estimate, tier: str
) -> dict[str, Any]:
    """Return the parameters with time, memory, cores and GPU from the estimate where they are not given."""
    needed: dict[str, Any] = {
        "name": f"grok-{configuration.experiment}",
        "timeout_min": 5 + math.ceil(SLACK * found.seconds(tier) / 60),
        "mem_gb": max(1, math.ceil(SLACK * found.memory(tier) / 1e9)),
        "cpus_per_task": configuration.keeping.threads,
    }
    if configuration.device.startswith("cuda"):
        needed["gpus_per_node"] = 1
    return {**needed, **given}


def script(given: Mapping[str, Any], commands: Sequence[Sequence[str]], logs: Path) -> str:
    """Return a batch script; several commands are one job array, one task each."""
    lines = ["#!/bin/bash", *sbatch_lines({k: v for k, v in given.items() if k != "cluster"})]
    array = len(commands) > 1
    lines += sbatch_lines({"output": f"{logs}/%{'A_%a' if array else 'j'}.out"})
    if not array:
        return "\n".join([*lines, "", shlex.join(commands[0]), ""])
    lines.append(f"#SBATCH --array=0-{len(commands) - 1}")
    cases = [f"  {i}) {shlex.join(line)} ;;" for i, line in enumerate(commands)]
    return "\n".join([*lines, "", 'case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac", ""])


def submit(given: Mapping[str, Any], commands: Sequence[Sequence[str]], logs: Path) -> list[Any]:
    """Submit one job for each command and return submitit's jobs.

    Raises
    ------
    ClusterError
        If submitit does not know a parameter, or there is no cluster here.
    """
    cluster = given.get("cluster")
    require(cluster)
    import submitit  # noqa: PLC0415 - an optional library

    known = {key: value for key, value in given.items() if key in _OWN}
    if cluster == "local":
        known.pop("mem_gb", None)
    others = {
        (key if key.startswith("slurm_") else f"slurm_{key}"): value
        for key, value in given.items()
        if key not in _OWN and key != "cluster"
    }
    try:
        executor = submitit.AutoExecutor(folder=logs, cluster=cluster or "slurm")
        executor.update_parameters(**known, **(others if cluster in {None, "slurm"} else {}))
        with executor.batch():
            return [
                executor.submit(submitit.helpers.CommandFunction(list(line), verbose=False))
                for line in commands
            ]
    except (NameError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"--slurm: the jobs cannot be submitted: {error}; --slurm cluster=local runs them here, "
            "--slurm-script FILE writes the batch script"
        ) from error
