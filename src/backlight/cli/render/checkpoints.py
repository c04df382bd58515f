"""Prints the checkpointed regions of a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backlight.cli.console import Page, line_json, source_line

if TYPE_CHECKING:
    from backlight.diagnose.checkpointing.observer import CheckpointObserver


def print_regions(page: Page, observer: CheckpointObserver, code: int) -> None:
    """Print each region with its remarks."""
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


def regions_as_json(observer: CheckpointObserver, script: str, code: int) -> dict[str, Any]:
    """Return the regions as JSON types."""
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
