"""``backlight profile``: where the time of a step goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.app import command
from backlight.cli.options import Json, Module, Script


@command("profile", "Diagnose", script=True)
def profile(
    context: typer.Context,
    script: Script,
    module: Module = False,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Steps to time, the cold first one included.")
    ] = 30,
    traced: Annotated[
        int, typer.Option("--traced", min=0, help="Steps to trace after them; 0 for none.")
    ] = 3,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Trace file; default <script>-trace.json.gz."),
    ] = None,
    stacks: Annotated[
        bool,
        typer.Option("--stacks", help="Record whole stacks in the trace; slows traced steps."),
    ] = False,
    tokens: Annotated[
        int | None, typer.Option("--tokens-per-step", min=1, help="Tokens of one step, over all ranks.")
    ] = None,
    peak: Annotated[
        float | None, typer.Option("--peak-flops", min=1, help="Peak FLOP/s of one device, as 989e12.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Run directory to store the profile in."),
    ] = None,
    confirm: Annotated[
        bool,
        typer.Option("--confirm", help="Test each suggestion: run with and without it."),
    ] = False,
    pairs: Annotated[
        int, typer.Option("--pairs", min=3, help="Pairs of runs for each suggestion of --confirm.")
    ] = 5,
    as_json: Json = False,
) -> int:
    """Profile step time by phase, module and operator.

    The script is ended after its steps: some are timed by the clock alone, then a few under torch's profiler.
    """
    from backlight.cli.console import Page, print_json
    from backlight.cli.render.profile import progress, show
    from backlight.launch.script import check
    from backlight.records import to_json

    check(script, module=module)
    from backlight.diagnose.profile.controls import run_controls
    from backlight.diagnose.profile.result import find_findings, profile_run, store_profile
    from backlight.diagnose.profile.run import ProfileOptions
    from backlight.diagnose.profile.run import profile as run

    where = trace or (None if out is not None else Path(f"{Path(script).stem}-trace.json.gz"))
    options = ProfileOptions(
        steps=steps,
        traced=traced,
        trace=where,
        keep=out is not None,
        stacks=stacks,
        tokens=tokens,
        peak=peak,
        quiet=as_json,
    )
    arguments = list(context.args)
    with profile_run(out, script, arguments) as writer:
        profiled = run(script, arguments, options, module=module)
        result = profiled.result
        if confirm:
            with progress() as advance:
                controls = run_controls(profiled, options, module=module, pairs=pairs, progress=advance)
            result = result.model_copy(update={"controls": controls})
        if writer is not None:
            result = store_profile(replace(profiled, result=result), writer)
        found = find_findings(writer) if writer is not None and result.rank == 0 else []
    if not as_json:
        show(result, found)
        if out is not None:
            Page().say(("run: ", "dim"), f"{out}: backlight report {out}")
    elif result.rank == 0:
        print_json({**result.model_dump(mode="json"), "findings": to_json(found)})
    return 0
