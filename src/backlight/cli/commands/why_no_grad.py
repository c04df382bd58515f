"""``backlight why-no-grad``: the reason for each parameter that gets no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from backlight.cli.app import command
from backlight.cli.options import Json, Module, Script

if TYPE_CHECKING:
    from backlight.diagnose.missing_gradients.reasons import MissingGradients, Row
    from backlight.user_code import SourceLine


@command("why-no-grad", "Diagnose", script=True)
def why_no_grad(
    context: typer.Context,
    script: Script,
    module: Module = False,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Optimizer steps before the script is ended.")
    ] = 3,
    as_json: Json = False,
    fail: Annotated[bool, typer.Option("--fail", help="Exit 1 if a parameter is not trained.")] = False,
) -> int:
    """Explain why parameters receive no gradient.

    What the graph of the first loss shows is printed before the first backward. The script is ended after a
    few steps; nothing is stored.

    Raises
    ------
    ValueError
        If the script ended without a backward.
    """
    from backlight.cli.console import Page, print_json
    from backlight.diagnose.missing_gradients.observer import MissingGradientObserver
    from backlight.launch.observe import end_script, explain
    from backlight.launch.script import check

    check(script, module=module)
    page = Page()
    printed: dict[str, str] = {}

    def early(rows: list[Row], line: SourceLine | None) -> None:
        if rows and not as_json:
            page.say((f"before the first backward ({line or 'line not known'}):", "bold"))
            for row in rows:
                _print_row(page, row)
                printed[row.name] = row.reason.text if row.reason else ""

    observer = MissingGradientObserver(steps, end_script, early)
    code = explain(observer, script, list(context.args), module=module, quiet=as_json)
    answer = observer.answer
    if not answer.backwards:
        raise ValueError(
            f"{script}: ended (exit code {code}) without a backward; expected a script that calls "
            "loss.backward() and is not stopped before"
        )
    if as_json:
        print_json(_as_json(answer, script, code))
    else:
        _print(page, answer, code, printed)
    return int(fail and bool(answer.rows or answer.failure))


def _print_row(page: Any, row: Row) -> None:
    from backlight.cli.console import source_line

    reason = row.reason
    if reason is not None:
        shape = "x".join(map(str, row.shape)) or "scalar"
        where = source_line(reason.line)
        page.say(
            "  ", (row.name, "bold"), f" [{shape}]  ", (reason.text, "yellow"), f"  {where}" if where else ""
        )


def _print(page: Any, answer: MissingGradients, code: int, printed: dict[str, str]) -> None:
    """Print what is new since the rows ``printed`` before the first backward, and the total."""
    from backlight.cli.console import source_line

    watched = f"{answer.watched} parameters, {answer.steps} steps, {answer.backwards} backwards"
    fresh = [row for row in answer.rows if row.reason and printed.get(row.name) != row.reason.text]
    cleared = sorted(set(printed) - {row.name for row in answer.rows})
    if fresh:
        page.say(("since then:" if printed else "found:", "bold"))
        for row in fresh:
            _print_row(page, row)
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


def _as_json(answer: MissingGradients, script: str, code: int) -> dict[str, Any]:
    from backlight.cli.console import line_json

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
