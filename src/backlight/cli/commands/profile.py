"""``backlight profile``: where the time of a step goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from backlight.session.profiling import Profile


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
    tokens: Annotated[
        int | None, typer.Option("--tokens-per-step", min=1, help="Tokens of one step, over all ranks.")
    ] = None,
    peak: Annotated[
        float | None, typer.Option("--peak-flops", min=1, help="FLOP/s of one device, such as 989e12.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object; what the script prints goes to standard error.")
    ] = False,
) -> int:
    """Say where the time of a step goes: backlight profile [OPTIONS] SCRIPT [ITS ARGUMENTS].

    The script runs until its steps are counted: some under a clock alone, then a few under torch's
    profiler. It is ended after them.
    """
    from backlight.cli.profiled import as_object, show
    from backlight.session.launcher import check

    check(script, module=module)
    from backlight.session.profiling import profile as run

    where = trace or Path(f"{Path(script).stem}-trace.json.gz")
    answer: Profile = run(
        script,
        list(context.args),
        module=module,
        steps=steps,
        traced=traced,
        trace=where if traced else None,
        tokens=tokens,
        peak=peak,
        quiet=as_json,
    )
    if as_json:
        from backlight.cli.explained import print_json

        print_json(as_object(answer))
    else:
        show(answer)
    return 0


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``; what follows SCRIPT belongs to the script."""
    app.command("profile", context_settings={"allow_extra_args": True, "allow_interspersed_args": False})(
        profile
    )
