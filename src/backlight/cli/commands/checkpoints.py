"""``backlight checkpoints``: every activation-checkpointed region, inspected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from backlight.cli.app import command
from backlight.cli.options import Json, Module, Script

if TYPE_CHECKING:
    from backlight.diagnose.checkpointing.observer import CheckpointObserver


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
        print_json(_as_json(observer, script, code))
    else:
        _print(Page(), observer, code)
    return int(fail and any(region.remarks for region in observer.regions))


def _print(page: Any, observer: CheckpointObserver, code: int) -> None:
    from backlight.cli.console import source_line

    regions = observer.regions
    looked = f"{observer.steps} steps, {observer.backwards} backwards"
    if not regions:
        page.say("no checkpointed region", f" ({looked})")
    else:
        noun = "region" if len(regions) == 1 else "regions"
        page.say((f"{len(regions)} checkpointed {noun}", "bold"), f" ({looked})")
    for region in regions:
        page.say(
            (region.function, "bold"), f"  {region.mode}, {region.calls} calls, ",
            f"{region.recomputations} recomputations  {source_line(region.line)}",
        )  # fmt: skip
        for remark in region.remarks:
            where = source_line(remark.line) if remark.line != region.line else ""
            page.say("  ", (f"{remark.kind}: ", "yellow"), remark.text, f"  {where}" if where else "")
    for note in observer.notes:
        page.say(("note: ", "dim"), note)
    if code:
        page.say(("note: ", "dim"), f"the script ended with exit code {code}")


def _as_json(observer: CheckpointObserver, script: str, code: int) -> dict[str, Any]:
    from backlight.cli.console import line_json

    return {
        "script": script,
        "exit_code": code,
        "steps": observer.steps,
        "backwards": observer.backwards,
        "regions": [
            {
                "function": region.function,
                "reentrant": region.reentrant is not False,
                "mode": region.mode,
                "preserve_rng_state": region.preserves,
                "place": line_json(region.line),
                "calls": region.calls,
                "recomputations": region.recomputations,
                "remarks": [
                    {"kind": r.kind, "text": r.text, "place": line_json(r.line)} for r in region.remarks
                ],
            }
            for region in observer.regions
        ],
        "notes": observer.notes,
    }
