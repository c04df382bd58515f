"""``backlight nan``: origin of the first non-finite value."""

from __future__ import annotations

from typing import Annotated

import typer

from backlight.cli.app import command
from backlight.cli.options import Json, Module, Script


@command("nan", "Diagnose", script=True)
def nan(
    context: typer.Context,
    script: Script,
    module: Module = False,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Optimizer steps to check; default all.")
    ] = None,
    as_json: Json = False,
    fail: Annotated[bool, typer.Option("--fail", help="Exit 1 if an origin was found.")] = False,
) -> int:
    """Find the operation that produced the first NaN or infinity.

    Every operation is checked, which takes time but changes no number of the run. The script is ended once a
    loss, a gradient or a parameter is not finite.

    Raises
    ------
    ValueError
        If the script ended before anything could be looked at.
    """
    from backlight.cli.console import Page, print_json
    from backlight.cli.render.nan import origin_as_json, print_origin
    from backlight.diagnose.nan.tracer import NanTracer
    from backlight.launch.observe import end_script, explain
    from backlight.launch.script import check

    check(script, module=module)
    tracer = NanTracer(end_script, steps)
    code = explain(tracer, script, list(context.args), module=module, quiet=as_json)
    if not tracer.backwards and tracer.found is None:
        raise ValueError(
            f"{script}: ended (exit code {code}) without a backward; expected a script that calls "
            "loss.backward() and is not stopped before"
        )
    if as_json:
        print_json(origin_as_json(tracer, script, code))
    else:
        print_origin(Page(), tracer, code)
    return int(fail and tracer.found is not None)
