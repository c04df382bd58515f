"""``%%backlight``: watch the training run in a notebook cell, after ``%load_ext backlight``."""

from __future__ import annotations

import argparse
import shlex
from typing import Any, NoReturn

from IPython.core.error import UsageError

from backlight.session.watch import watch


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%backlight: {message}")


def _parser() -> _Parser:
    parser = _Parser("%%backlight", add_help=False, description=__doc__)
    parser.add_argument("--run", metavar="DIR", help="run directory; default runs/<notebook>-<time>")
    parser.add_argument("--monitors", metavar="NAME,...", help="monitors, as health,correctness")
    parser.add_argument("--every", type=int, help="steps between recordings")
    return parser


def _is_valid(shell: Any, cell: str) -> bool:
    """Return whether a cell can run at all."""
    try:
        shell.compile.ast_parse(shell.transform_cell(cell))
    except SyntaxError:
        return False
    return True


def register(shell: Any) -> None:
    """Register the magic in the shell of a notebook or of IPython."""

    def backlight(line: str, cell: str) -> None:
        options = vars(_parser().parse_args(shlex.split(line)))
        settings = {name: value for name, value in options.items() if value is not None}
        try:
            watching = watch(None, None, **settings)
        except ValueError as error:
            raise UsageError(f"%%backlight: {error}") from None
        if _is_valid(shell, cell):
            shell.user_ns["watch"] = watching
            with watching:
                result = shell.run_cell(cell)
                if result.error_in_exec is not None:
                    watching.stop(result.error_in_exec)
        else:
            result = shell.run_cell(cell)  # it reports the error
        failure = result.error_before_exec or result.error_in_exec
        if failure is not None:
            if isinstance(failure, SyntaxError):  # IPython shows one whatever it renders to
                failure = RuntimeError(str(failure))
            failure._render_traceback_ = list  # the cell has shown it: raised again, it stops "Run all"
            raise failure

    backlight.__doc__ = f"Watch the training run in this cell.\n\n{_parser().format_help()}"
    shell.register_magic_function(backlight, "cell", "backlight")
