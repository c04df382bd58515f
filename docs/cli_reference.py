"""The reference of the command line: a section for each command, from the page that its ``--help`` prints."""

from __future__ import annotations

import re
from typing import Any

import typer

from backlight.cli import app
from backlight.cli.help_page import command_page


def reference() -> str:
    """Return Markdown: groups, their commands, and the help of each command as text."""
    app.load_commands()
    main = typer.main.get_command(app.app)
    root = main.make_context("backlight", [], resilient_parsing=True)
    parts = []
    for panel, names in app.PANELS.items():
        parts.append(f"## {panel}")
        for name in names:
            command = main.get_command(root, name)
            inner = getattr(command, "commands", None)
            found = {name: command} if inner is None else {f"{name} {sub}": inner[sub] for sub in inner}
            parts += [_section(root, *item) for item in found.items()]
    return "\n\n".join(parts)


def _section(root: Any, name: str, command: Any) -> str:
    context = command.make_context(f"backlight {name}", [], resilient_parsing=True)
    context.parent = None  # its name has that of the group already
    page = re.sub(r"\x1b\[[0-9;]*m", "", command_page(command, context))
    return f"### backlight {name}\n\n```text\n{page}```"
