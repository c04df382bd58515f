"""Start training scripts with torchrun, and terminate them by process id after a timeout."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent


def watching(*arguments: object) -> list[str]:
    """Return the command that runs a script with ``backlight run``."""
    return [sys.executable, "-m", "backlight", "run", *map(str, arguments)]


def torchrun(ranks: int, *arguments: object, timeout: float = 240.0, **environment: str) -> str:
    """Run a script, or ``-m module``, on ``ranks`` ranks; return standard error."""
    status, errors = launched(ranks, *arguments, timeout=timeout, **environment)
    assert status == 0, errors[-4000:]
    return errors


def launched(
    ranks: int,
    *arguments: object,
    options: tuple[str, ...] = (),
    timeout: float = 240.0,
    meanwhile: Callable[[subprocess.Popen[str]], None] | None = None,
    **environment: str,
) -> tuple[int, str]:
    """Run a script on ``ranks`` ranks, call ``meanwhile``; return exit status and standard error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    paths = os.pathsep.join([str(HERE.parent), os.environ["PYTHONPATH"]])
    running = subprocess.Popen(
        [*command, *options, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if meanwhile is not None:
            meanwhile(running)
        _, errors = running.communicate(timeout=timeout)
    except BaseException:
        # torchrun starts its ranks in new process groups, and terminates them when it gets SIGTERM.
        running.send_signal(signal.SIGTERM)
        try:
            running.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            running.kill()
        raise
    return running.returncode, errors


def run_ranks(folder: Path, *command: str, timeout: float = 120.0) -> list[subprocess.CompletedProcess[str]]:
    """Run a Python command on two ranks without a launcher; return their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "BACKLIGHT_RUN_ID": "one"},
        )
        for rank in range(2)
    ]  # fmt: skip
    done = []
    for process in started:
        try:
            out, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, errors))
    return done
