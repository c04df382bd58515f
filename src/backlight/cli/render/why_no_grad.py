"""Prints the parameters without a gradient and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backlight.cli.console import Page, line_json, source_line

if TYPE_CHECKING:
    from backlight.diagnose.missing_gradients.reasons import MissingGradients, Row


def print_row(page: Page, row: Row) -> None:
    """Print one parameter with the reason."""
    reason = row.reason
    if reason is not None:
        shape = "x".join(map(str, row.shape)) or "scalar"
        where = source_line(reason.line)
        page.say(
            "  ", (row.name, "bold"), f" [{shape}]  ", (reason.text, "yellow"), f"  {where}" if where else ""
        )


def print_missing(page: Page, answer: MissingGradients, code: int, printed: dict[str, str]) -> None:
    """Print what is new since the rows ``printed`` before the first backward, and the total."""
    watched = f"{answer.watched} parameters, {answer.steps} steps, {answer.backwards} backwards"
    fresh = [row for row in answer.rows if row.reason and printed.get(row.name) != row.reason.text]
    cleared = sorted(set(printed) - {row.name for row in answer.rows})
    if fresh:
        page.say(("since then:" if printed else "found:", "bold"))
        for row in fresh:
            print_row(page, row)
    for name in cleared:
        page.say("  ", (name, "bold"), "  got a gradient later")
    if answer.failure is not None:
        page.say(("backward failed: ", "red"), answer.failure.text, f"  {source_line(answer.failure.line)}")
    if answer.rows:
        noun = "parameter is" if len(answer.rows) == 1 else "parameters are"
        page.say((f"{len(answer.rows)} {noun} not trained", "bold"), f" ({watched})")
    elif answer.failure is None:
        page.say("every parameter gets a gradient and is in an optimizer", f" ({watched})")
    for note in answer.notes:
        page.say(("note: ", "dim"), note)
    if code:
        page.say(("note: ", "dim"), f"the script ended with exit code {code}")


def missing_as_json(answer: MissingGradients, script: str, code: int) -> dict[str, Any]:
    """Return the result as JSON types."""
    failure = answer.failure
    return {
        "script": script,
        "exit_code": code,
        "parameters": answer.watched,
        "steps": answer.steps,
        "backwards": answer.backwards,
        "nodes": answer.nodes,
        "not_trained": [
            {
                "parameter": row.name,
                "aliases": list(row.aliases),
                "shape": list(row.shape),
                "cause": row.reason.cause.value,
                "text": row.reason.text,
                "place": line_json(row.reason.line),
                "found": row.when,
            }
            for row in answer.rows
            if row.reason is not None
        ],
        "failure": None
        if failure is None
        else {"text": failure.text, "place": line_json(failure.line), "saved": line_json(failure.saved)},
        "notes": answer.notes,
    }
