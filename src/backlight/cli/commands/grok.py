"""``backlight grok``: the experiments; every module of :mod:`backlight.cli.grok` is one of its commands."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import typer

from backlight.cli import grok as parts


def add_to(app: typer.Typer) -> None:
    """Add the group of commands to ``app``."""
    group = typer.Typer(
        name="grok",
        help="Run the experiments on grokking, and judge what they show.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for module in pkgutil.iter_modules(parts.__path__):
        importlib.import_module(f"{parts.__name__}.{module.name}").add_to(group)
    for command in group.registered_commands:
        written = inspect.cleandoc(getattr(command.callback, "__doc__", "") or "")
        command.help = written.split("\n\nRaises\n")[0].split("\n\nParameters\n")[0]
    app.add_typer(group)
