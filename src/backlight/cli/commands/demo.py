"""``backlight demo``: the main job on real text, from the installed package alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.app import command


@command("demo", "Start")
def demo(
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory; default runs/demo-<time>.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=10, help="Training steps.")] = 120,
) -> int:
    """Train a small transformer under backlight and write the report."""
    from backlight.analysis.report import write_html
    from backlight.cli.demo_script import example_script

    target = out if out is not None else Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    script = example_script("char_gpt.py")
    command = [
        sys.executable,
        "-m",
        "backlight",
        "run",
        "--out",
        str(target),
        str(script),
        "--steps",
        str(steps),
    ]
    print("$ backlight run", *command[4:], flush=True)
    # Idle OpenMP threads spin by default, which makes a busy machine many times slower.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    code = subprocess.run(command, check=False, env=environment).returncode
    if code == 0:
        print(f"report: {write_html(target, target / 'report.html').resolve()}")
    return code
