"""Starts the scripts of this folder on several ranks over gloo, and ends them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import backlight

HERE = Path(__file__).parent


def start(ranks: int, script: str, *arguments: str, timeout: float = 240) -> str:
    """Run ``script`` under torchrun; return what it wrote to standard error."""
    paths = os.pathsep.join([str(HERE.parent), str(Path(backlight.__file__).parents[1])])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *command, str(HERE / script), *arguments],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr
