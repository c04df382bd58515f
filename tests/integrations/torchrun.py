"""Start the scripts of this directory on several ranks over gloo, and terminate them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import backlight

HERE = Path(__file__).parent


def environment() -> dict[str, str]:
    """Return the environment of a child process, with the source and test directories on its path."""
    given = filter(None, [os.environ.get("PYTHONPATH")])
    paths = os.pathsep.join([*given, str(HERE.parent), str(Path(backlight.__file__).parents[1])])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def start(ranks: int, script: str, *arguments: str, timeout: float = 240) -> str:
    """Run ``script`` under torchrun; return what it wrote to standard error."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *command, str(HERE / script), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr
