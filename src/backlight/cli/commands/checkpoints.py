"""``backlight checkpoints``: inspect activation checkpointing."""

from __future__ import annotations

from typing import Annotated

import typer

from backlight.cli.app import command
from backlight.cli.options import Json, Module, Script


@command("checkpoints", "Diagnose", script=True)
def checkpoints(
    context: typer.Context,
    script: Script,
    module: Module = False,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Optimizer steps before the script is ended.")
    ] = 2,
    as_json: Json = False,
    fail: Annotated[bool, typer.Option("--fail", help="Exit 1 if a region has remarks.")] = False,
) -> int:
    """Inspect activation checkpointing in a training script.

    For each region: its mode and line, in-place operations inside, state that differs between forward
    and recomputation, attention inputs that are not contiguous, and parameters that its boundary cuts.

    Raises
    ------
    ValueError
        If the script ended before anything could be looked at.
    """
    from backlight.cli.console import Page, print_json
    from backlight.cli.render.checkpoints import print_regions, regions_as_json
    from backlight.diagnose.checkpointing.observer import CheckpointObserver
    from backlight.launch.observe import end_script, explain
    from backlight.launch.script import check

    check(script, module=module)
    observer = CheckpointObserver(steps, end_script)
    code = explain(observer, script, list(context.args), module=module, quiet=as_json)
    if not observer.backwards and not observer.regions:
        raise ValueError(
            f"{script}: ended (exit code {code}) without a backward; expected a script that calls "
            "loss.backward() and is not stopped before"
        )
    if as_json:
        print_json(regions_as_json(observer, script, code))
    else:
        print_regions(Page(), observer, code)
    return int(fail and any(region.remarks for region in observer.regions))
