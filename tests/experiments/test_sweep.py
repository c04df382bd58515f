"""Sweeps and jobs: one run directory each, shared cores, batch scripts."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backlight.experiments import sweep
from backlight.experiments.config import ConfigurationError, configure
from backlight.experiments.cost import Cost, Estimate
from backlight.experiments.sweep import (
    batch_script,
    concurrent_runs,
    job_parameters,
    members,
    run_all,
    seeds,
)
from backlight.launch.slurm import ClusterError, parameters
from backlight.monitors.grokking.settings import Measures


def test_seeds_and_members(tmp_path: Path) -> None:
    assert seeds("0-2,7") == [0, 1, 2, 7]
    found = members(tmp_path, [0, 1], ["training.lr=0.1,0.2"])
    names = ["lr-0.1-seed-0", "lr-0.2-seed-0", "lr-0.1-seed-1", "lr-0.2-seed-1"]
    assert [m.directory.name for m in found] == names
    assert found[1].options == ("--set", "training.lr=0.2", "--seed", "0")
    for text in ("4-1", "a", ""):
        with pytest.raises(ConfigurationError, match="expected seeds such as 0-4 or 0,1,7"):
            seeds(text)
    with pytest.raises(ConfigurationError, match="expected key=value,value"):
        members(tmp_path, [], ["training.lr"])


def test_runs_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backlight.experiments.sweep.available_cores", lambda: 8)
    cases = ((None, 20, 1), (None, 20, 3), (None, 2, 1), (5, 20, 4), (None, 20, 16))
    assert [concurrent_runs(*case) for case in cases] == [8, 2, 2, 5, 1]


@pytest.mark.slow
def test_commands_run_with_their_threads_and_failures_are_counted(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['OMP_NUM_THREADS']); sys.exit(int(sys.argv[1]))"
    commands = [
        (tmp_path / name, [sys.executable, "-c", code, exit_code])
        for name, exit_code in (("a", "0"), ("b", "3"))
    ]
    ended: list[tuple[str, int]] = []
    failed = run_all(commands, concurrent=2, threads=3, on_end=lambda f, c: ended.append((f.name, c)))
    assert failed == 1
    assert sorted(ended) == [("a", 0), ("b", 3)]
    assert (tmp_path / "a.log").read_text() == "3\n"


FOUND = Estimate((Cost("training", 100, 60.0, 0, 0),), (), 3 * 10**9, 10**12, 0, 10**12, Measures())


@pytest.mark.slow
def test_jobs_request_estimated_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = configure("oracle", None, ("x", {"device": "cuda", "run": {"threads": 4}}))
    timed = []
    monkeypatch.setattr(sweep, "estimate_of", lambda of, path, budget: timed.append(of.device) or FOUND)
    monkeypatch.setattr(sweep.devices, "types", lambda: ("cpu",))

    def of(*items: str) -> tuple[dict[str, Any], str]:
        return job_parameters(parameters(items), configuration, tmp_path, degrade=False)

    given, note = of("partition=gpu", "mem_gb=9")
    assert given == {
        "name": "grok-oracle", "timeout_min": 155, "mem_gb": 9, "cpus_per_task": 4, "gpus_per_node": 1,
        "partition": "gpu",
    }  # fmt: skip
    assert timed == ["cpu"]  # this machine has no GPU
    assert "device 'cuda' is not on this machine: time and memory of the job are those" in note
    # With both given nothing is timed, and what is given under Slurm's names is not requested twice.
    same, note = of("time=1:00:00", "mem=9G", "gres=gpu:a100:1", "cpus_per_task=2")
    assert same == {
        "name": "grok-oracle", "time": "1:00:00", "mem": "9G", "gres": "gpu:a100:1", "cpus_per_task": 2,
    }  # fmt: skip
    assert (timed, note) == (["cpu"], "")
    monkeypatch.setattr(sweep.devices, "types", lambda: ("cpu", "cuda"))
    assert of("partition=gpu")[1] == ""
    assert timed == ["cpu", "cuda"]
    on_cpu = dataclasses.replace(configuration, device="cpu")
    assert "gpus_per_node" not in job_parameters({}, on_cpu, tmp_path, degrade=False)[0]
    text = batch_script(given, [["backlight", "grok", "run", "a b"]], Path("logs"))
    assert "#SBATCH --time=155\n#SBATCH --mem=9G\n" in text
    assert "#SBATCH --partition=gpu\n" in text
    assert text.endswith("backlight grok run 'a b'\n")
    array = batch_script(given, [["one"], ["two"]], Path("logs"))
    assert "#SBATCH --array=0-1" in array
    done = subprocess.run(["bash", "-n"], input=array, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ClusterError, match="expected key=value, such as partition=gpu"):
        parameters(["partition"])
