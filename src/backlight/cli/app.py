"""The ``backlight`` command: the modules of :mod:`backlight.cli.commands` declare its commands."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

import backlight
from backlight.cli.help_page import HelpCommand, HelpGroup, HelpGroupWithDefault
from backlight.cli.script_command import ScriptCommand
from backlight.extras import EXTRA_OF, MissingPackageError
from backlight.launch.script import Interrupted, raise_interrupt
from backlight.registry import UnknownNameError
from backlight.store.errors import StoreError
from backlight.terminal import write

PANELS = {
    "Start": ("run", "report", "open", "top", "doctor", "demo"),
    "Diagnose": (
        "why-no-grad", "check", "nan", "attach", "profile", "trace", "test-matrix", "memory",
    ),
    "Runs": ("ls", "findings", "compare", "query", "export", "compact", "join", "mcp"),
    "Research": ("spectra", "sweep", "gram", "grok"),
}  # fmt: skip
"""Commands by group, in the order of ``--help``; each group is a module of :mod:`backlight.cli.commands`."""

_MODULES = {"attach", "memory", "run"}
"""Commands in a module of their own."""

_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}
_ORDER = list(_PANEL_OF)

REFUSALS = (ValueError, OSError, StoreError, UnknownNameError, ModuleNotFoundError)
"""Errors whose message names what, where, expected, got and the fix."""

_EXHAUSTED = (RecursionError, MemoryError)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_HELP = {"help_option_names": ["-h", "--help"]}
_OPTIONS: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "cls": HelpGroup,
    "context_settings": _HELP,
}

_SUMMARY = "See inside the backward pass of any PyTorch training, unchanged."
app = typer.Typer(name="backlight", help=_SUMMARY, add_completion=True, **_OPTIONS)
grok = typer.Typer(
    name="grok", help="Run experiments on grokking and diagnose grokking in runs.", add_completion=False,
    **_OPTIONS,
)  # fmt: skip

memory = typer.Typer(
    name="memory", help="Measure the memory of a step of a script, or predict that of a recipe.",
    add_completion=False, **(_OPTIONS | {"cls": HelpGroupWithDefault}),
)  # fmt: skip
_GROUPS = {"grok": grok, "memory": memory}

# Newer releases of typer carry a click of their own: the class is found by its name.
_USAGE: type[Any] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def command(
    name: str, *examples: str, group: str = "", script: bool = False
) -> Callable[[_Function], _Function]:
    """Register a function as a command.

    Parameters
    ----------
    name:
        Its name, in :data:`PANELS`.
    examples:
        Command lines that its ``--help`` shows.
    group:
        ``"grok"`` or ``"memory"`` for a command of that group.
    script:
        Whether what follows the first argument belongs to the user's script, as in ``python``.
    """

    def register(function: _Function) -> _Function:
        settings: dict[str, Any] = {
            "allow_extra_args": script,
            "allow_interspersed_args": not script,
        }
        target = _GROUPS.get(group, app)
        target.command(
            name, cls=ScriptCommand if script else HelpCommand, help=inspect.cleandoc(function.__doc__ or ""),
            epilog="\n".join(examples), rich_help_panel="" if group else _PANEL_OF[name],
            context_settings=settings,
        )(function)  # fmt: skip
        return function

    return register


def _version(wanted: bool) -> None:
    if wanted:
        write(f"backlight {backlight.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Print the traceback of an error, not one line.")
    ] = False,
) -> None:
    """Take the options in front of a command."""
    context.obj = {"traceback": traceback, "version": version}


def load_commands(name: str = "") -> None:
    """Import the command ``name``, with those in its module; every command where that is none of them.

    A watched script starts sooner without the others.
    """
    if name in _PANEL_OF and name != "grok":
        module = name if name in _MODULES else _PANEL_OF[name].lower()
        importlib.import_module(f"backlight.cli.commands.{module}")
        if name in _GROUPS:
            _add_groups()
    else:
        _load_all()


@functools.cache  # a process may call main again
def _load_all() -> None:
    folder = Path(__file__).parent / "commands"
    for module in pkgutil.walk_packages([str(folder)], "backlight.cli.commands."):
        importlib.import_module(module.name)
    app.registered_commands.sort(key=lambda found: _ORDER.index(found.name or ""))
    grok.registered_commands.sort(key=lambda found: found.name or "")
    _add_groups()


@functools.cache
def _add_groups() -> None:
    for name, group in _GROUPS.items():
        app.add_typer(group, rich_help_panel=_PANEL_OF[name])


def error_line(error: Exception, command: str = "") -> str:
    """Return the line for ``error`` of a command; for a missing package, how to install it."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in EXTRA_OF:
        line = error if isinstance(error, MissingPackageError) else MissingPackageError(package)
        return f"backlight: {line}" if line.what else f"backlight {command}: {line}"
    return f"backlight: {_message(error)}"


def _message(error: Exception) -> str:
    if isinstance(error, _EXHAUSTED):
        what = "nested too deeply" if isinstance(error, RecursionError) else "larger than the memory"
        return f"the input is {what}; --traceback shows where"
    text = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror and error.filename2 is None:
        text = f"{error.filename}: {error.strerror}"
    remote = sys.modules.get("backlight.store.read.remote")  # imported where a run is behind a URL
    return (text if remote is None else remote.shown(text)) or type(error).__name__


def _usage_line(error: Any) -> str:
    """Return the line for wrong arguments, with what to type next."""
    text, kind, context = error.format_message(), type(error).__name__, error.ctx
    text = text if text.endswith("...") else text.removesuffix(".")
    if context is None or text.endswith("?"):  # it suggests a command already
        return str(text)
    if hasattr(context.command, "list_commands") and kind in {"UsageError", "NoSuchCommand"}:
        return f"{text}; {context.command_path} --help lists the commands"
    example, *_ = (context.command.epilog or "").splitlines() or [""]
    return f"{text}, as in: {example}" if example and kind == "MissingParameter" else str(text)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit.

    Exit code 0 is done, 1 is what the user asked to fail on, 2 is an error, reported in one line; a watched
    script exits with its own code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    code: object = 0
    interrupt: Interrupted | None = None
    name = next((word for word in arguments if word != "--traceback"), "")
    load_commands(name)
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="backlight", standalone_mode=False)
    except Interrupted as ended:
        interrupt = ended
    except typer.Abort:
        sys.exit(130)
    except _USAGE as error:
        write(f"backlight: {_usage_line(error)}", file=sys.stderr)
        sys.exit(2)
    except (*REFUSALS, *_EXHAUSTED) as error:
        if "--traceback" in arguments[:1]:
            traceback.print_exc()
        else:
            write(error_line(error, name), file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    if interrupt is not None:  # not above: the exception in progress would become its context
        raise_interrupt(interrupt)
    sys.exit(code if isinstance(code, int) else 0)
