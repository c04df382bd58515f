"""The checks of ``bench/gpu_checks`` on the simulated accelerator, with no package but what they need."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from simulation_needs import NEEDS_SIMULATION

from bare_environment import bare_environment, gpu_bench
from processes import run_captured

ROOT = Path(__file__).parents[2]
GPU = gpu_bench()

pytestmark = NEEDS_SIMULATION

LEFT_OUT = {
    "graph_capture.py": ["reduce-overhead: not run: Inductor has no back-end for sim"],
    "device_of_threads.py": ["nvidia-smi: not run: it is missing"],
    "forked_children.py": [
        "children on the device: not run: the simulated one works in no forked process; they use the host"
    ],
    "collectives.py": ["NCCL: not run: this torch has none for sim; the stall is one of gloo"],
    "memory_prediction.py": [
        "autocast and fused attention: not run: predictions follow the rules of CUDA, not of sim"
    ],
    "profile_split.py": [
        "launch: idle time: not run: torch's profiler records no kernels of sim",
        "device: idle time: not run: torch's profiler records no kernels of sim",
    ],
    "step_cost.py": ["cudaHostAlloc: not run: the simulated device counts no pinned memory"],
}
"""What the simulated device cannot run, with the reason that is printed; all else holds there."""

QUICK = ("graph_capture.py",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name, _ in GPU.SUBJECTS],
)
def test_check_holds_or_states_what_is_missing(name: str, tmp_path: Path) -> None:
    command = [f"bench/gpu_checks/{name}", "--device", "sim", "--small"]
    done = run_captured([sys.executable, *command], cwd=ROOT, env=bare_environment(tmp_path, GPU))
    lines = done.stdout.splitlines()
    assert lines[0] == f"expected: {GPU.describe(GPU.CHECKS / name)[1]}", done.stderr
    assert [line for line in lines if ": not run: " in line] == LEFT_OUT.get(name, [])
    assert (done.returncode, lines[-1]) == (0, "holds"), done.stdout + done.stderr


SMI = """#!/bin/sh
if [ -e {seen} ]; then
    for line in {lines}; do echo "GPU-$line, 123, 400 MiB"; done
fi
touch {seen}
"""
"""Lists no process at the first question, which comes before the ranks start."""


@pytest.mark.full
@pytest.mark.parametrize(("lines", "code"), [("1 2", 0), ("1 2 3", 1)])
def test_a_rank_that_nvidia_smi_lists_twice_does_not_hold(lines: str, code: int, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI.format(seen=tmp_path / "seen", lines=lines))
    smi.chmod(0o755)
    environment = GPU.environment()
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    done = run_captured(
        [sys.executable, "bench/gpu_checks/device_of_threads.py", "--device", "sim", "--small"],
        cwd=ROOT,
        env=environment,
    )
    assert f"processes of the ranks: {len(lines.split())} (expected: 2)" in done.stdout, done.stderr
    assert done.returncode == code


COUNTED = """
import torch
from step_cost import counted

class Event:
    def __init__(self, name, start, end=0, kind="CPU"):
        self.name, self.start_ns, self.end_ns = (lambda: name), (lambda: start), (lambda: end)
        self.device_type = lambda: getattr(torch.autograd.DeviceType, kind)

print(counted([
    Event("step 0", 0, 10), Event("step 1", 10, 20), Event("step 0", 3, 40, "CUDA"),
    Event("cudaLaunchKernel", 1), Event("cudaLaunchKernelExC", 2), Event("cuLaunchKernel", 12),
    Event("cudaHostAlloc", 15), Event("cudaMemcpyAsync", 5), Event("cudaLaunchKernel", 25),
], 2))
"""


def test_launches_are_counted_by_the_step_that_makes_them() -> None:
    """What the simulated device has no events for."""
    environment = GPU.environment()
    environment["PYTHONPATH"] = f"{GPU.CHECKS}{os.pathsep}{environment['PYTHONPATH']}"
    done = run_captured([sys.executable, "-c", COUNTED], env=environment)
    assert done.stdout == "[(2, 0), (1, 1)]\n", done.stderr
