"""A minimal Slurm of two hosts for batch scripts: environment, ``srun`` and ``scontrol``."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from clusters.hosts import Host


def run_batch(
    script: Path,
    hosts: tuple[Host, Host],
    folder: Path,
    *,
    restart: int = 0,
    timeout: float = 120.0,
    **more: str,
) -> tuple[int, str]:
    """Run a batch script as Slurm does on two nodes; return exit code and output.

    ``more`` stands in the environment of the job.
    """
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    _tool(tools / "scontrol", "\n".join(f"echo {host.name}" for host in hosts))
    lines = ['[ "$1" = --kill-on-bad-exit=1 ] && shift']
    # Quote each argument: "$@" does not work, because a host's command is one string.
    lines += ['printf "#!/bin/bash\\nexec" > "$JOB/task"', 'printf " %q" "$@" >> "$JOB/task"']
    lines += [
        f'SLURM_NODEID={i} {shlex.join(host.command(["bash", str(folder / "task")]))} &\nps="$ps $!"'
        for i, host in enumerate(hosts)
    ]
    lines += ['code=0; for p in $ps; do wait "$p" || code=$?; done; exit $code']
    _tool(tools / "srun", "\n".join(lines))
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "JOB": str(folder),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2",
        "OMP_NUM_THREADS": "1",
        **more,
    }
    if restart:
        environment["SLURM_RESTART_COUNT"] = str(restart)
    done = subprocess.run(
        ["bash", str(script)],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout


def _tool(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
