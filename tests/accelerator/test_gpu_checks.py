"""The checks of ``bench/gpu_checks`` on the simulated accelerator, with no package but what they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_accelerator import pytestmark  # noqa: F401 - where the simulated accelerator can be built

from bare_environment import BARE, gpu_bench, installed_by

ROOT = Path(__file__).parents[2]
GPU = gpu_bench()

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
def test_check_holds_or_states_what_is_missing(name: str) -> None:
    command = [f"bench/gpu_checks/{name}", "--device", "sim", "--small"]
    done = subprocess.run(
        [sys.executable, "-c", BARE, ",".join(installed_by(GPU.WHEELS)), *command],
        cwd=ROOT, env=GPU.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == f"expected: {GPU.describe(GPU.CHECKS / name)[1]}", done.stderr
    assert [line for line in lines if ": not run: " in line] == LEFT_OUT.get(name, [])
    assert (done.returncode, lines[-1]) == (0, "holds"), done.stdout + done.stderr
