"""The reference of the command line: a section for each command, from the page that its ``--help`` prints."""

from __future__ import annotations

import click

from backlight.cli import app


def reference() -> str:
    """Return Markdown: groups, their commands, and the help of each command as text."""
    commands = app.all_commands()
    parts = []
    for panel, names in app.PANELS.items():
        parts.append(f"## {panel}")
        parts += [_section(name, commands[name]) for name in commands if name.partition(" ")[0] in names]
    return "\n\n".join(parts)


def _section(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"backlight {name}", **command.context_settings)
    return f"### backlight {name}\n\n```text\n{command.get_help(context)}\n```"
