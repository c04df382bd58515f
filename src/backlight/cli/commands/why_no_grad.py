"""``backlight why-no-grad``: the reason for each parameter that gets no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from backlight.cli.app import command
from backlight.cli.options import Json, Module, Script

if TYPE_CHECKING:
    from backlight.diagnose.missing_gradients.reasons import Row
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
    from backlight.cli.render.why_no_grad import missing_as_json, print_missing, print_row
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
                print_row(page, row)
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
        print_json(missing_as_json(answer, script, code))
    else:
        print_missing(page, answer, code, printed)
    return int(fail and bool(answer.rows or answer.failure))
