"""``backlight profile``: where the time of a step goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer


def profile(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script; with -m, a module.")],
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")] = False,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Steps to clock, the cold first one included.")
    ] = 30,
    traced: Annotated[
        int, typer.Option("--traced", min=0, help="Steps to trace after them; 0 for the clock alone.")
    ] = 3,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Where the trace goes; without it <script>-trace.json.gz."),
    ] = None,
    stacks: Annotated[
        bool,
        typer.Option("--stacks", help="Record whole stacks in the trace; slow, and traced steps stretch."),
    ] = False,
    tokens: Annotated[
        int | None, typer.Option("--tokens-per-step", min=1, help="Tokens of one step, over all ranks.")
    ] = None,
    peak: Annotated[
        float | None, typer.Option("--peak-flops", min=1, help="FLOP/s of one device, such as 989e12.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Keep the profile as a run directory, for report and compare."),
    ] = None,
    confirm: Annotated[
        bool,
        typer.Option("--confirm", help="Test what the profile suggests: run again, with and without it."),
    ] = False,
    pairs: Annotated[
        int, typer.Option("--pairs", min=3, help="Runs with and without each control of --confirm.")
    ] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object; what the script prints goes to standard error.")
    ] = False,
) -> int:
    """Say where the time of a step goes: backlight profile [OPTIONS] SCRIPT [ITS ARGUMENTS].

    The script runs until its steps are counted: some under a clock alone, then a few under torch's
    profiler. It is ended after them.
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


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``; what follows SCRIPT belongs to the script."""
    app.command("profile", context_settings={"allow_extra_args": True, "allow_interspersed_args": False})(
        profile
    )
