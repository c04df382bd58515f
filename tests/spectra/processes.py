"""Start ranks as processes without a launcher, which would import torch and end all ranks together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def start_ranks(count: int, *command: object) -> list[subprocess.Popen[str]]:
    """Start ``python *command`` on each rank, with the tests on the path."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tests = str(Path(__file__).parents[1])
    shared = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
