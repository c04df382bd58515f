"""The ``backlight`` command: every module of :mod:`backlight.cli.commands` is one command."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
import traceback
from typing import Annotated, Any

import typer

import backlight
from backlight.cli import commands
from backlight.cli.errors import REFUSALS, told

app = typer.Typer(
    name="backlight",
    help="See inside the backward pass of any PyTorch training, unchanged.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# Newer releases of typer carry a click of their own: the class is found by its name.
_USAGE: type[Any] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"backlight {backlight.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Print the traceback of an error, not one line.")
    ] = False,
) -> None:
    """See inside the backward pass of any PyTorch training, unchanged."""
    context.obj = {"traceback": traceback, "version": version}


@functools.cache
def _load() -> None:
    # Once: a process that calls `main` again would otherwise register every command again.
    for module in pkgutil.iter_modules(commands.__path__):
        importlib.import_module(f"{commands.__name__}.{module.name}").add_to(app)
    for command in app.registered_commands:
        # A docstring's sections are for readers of the code, not of --help.
        written = inspect.cleandoc(getattr(command.callback, "__doc__", "") or "")
        command.help = written.split("\n\nRaises\n")[0].split("\n\nParameters\n")[0]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code.

    0 is done, 1 is what the user asked to fail on, 2 is an error that is told in one line; a watched
    script leaves with its own code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    _load()
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="backlight", standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except _USAGE as error:
        print(f"backlight: {error.format_message()}", file=sys.stderr)
        sys.exit(2)
    except REFUSALS as error:
        if "--traceback" in arguments[:1]:
            traceback.print_exc()
        else:
            print(f"backlight: {told(error)}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    sys.exit(code if isinstance(code, int) else 0)
