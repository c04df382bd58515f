"""Help of the command line: usage, arguments, options and examples as text of at most 80 columns."""

from __future__ import annotations

import functools
import os
import shutil
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import typer

MAX_WIDTH = 80
"""Columns of a help page, also on wider terminals."""

COLUMN = 26
"""Widest name in front of a text; a longer one has the text below it."""

_KINDS = {"path": "PATH", "int": "N", "float": "X", "file": "FILE"}
"""Name of an option's value by the begin of its type."""


class HelpCommand(typer.core.TyperCommand):
    """A command whose ``--help`` is a page of this module; its epilog holds examples, one a line."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page."""
        formatter.write(command_page(self, ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, without a validator of pydantic for each option that is not given."""
        _spare_conversions(self.get_params(ctx))
        return super().parse_args(ctx, args)


def _spare_conversions(parameters: Iterable[Any]) -> None:
    for parameter in parameters:
        parameter.process_value = functools.partial(_value, parameter, parameter.process_value)


def _value(parameter: Any, process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    """Return the value of a parameter: what is absent or meant as text needs no conversion.

    For all else typer imports pydantic, which takes longer than the whole command line.
    """
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    is_absent = value is None and not parameter.required
    if is_absent or (kind is str and type(value) is str):
        return value if parameter.callback is None else parameter.callback(context, parameter, value)
    return process(context, value)


class HelpGroup(typer.core.TyperGroup):
    """A group whose ``--help`` lists its commands by panel."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page."""
        formatter.write(group_page(self, ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print the page where no command is named: that is not an error."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            raise typer.Exit
        _spare_conversions(self.get_params(ctx))
        return super().parse_args(ctx, args)


class HelpGroupWithDefault(HelpGroup):
    """A group whose first command is meant where none is named: ``memory train.py`` is ``memory measure``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the first command where the first word is neither a command nor a request for help."""
        first, *_ = self.list_commands(ctx)
        if args and args[0] not in {*self.list_commands(ctx), *ctx.help_option_names}:
            args = [first, *args]
        return super().parse_args(ctx, args)


def command_page(command: Any, context: Any) -> str:
    """Return the help page of a command."""
    summary, _, description = (command.help or "").partition("\n\n")
    parts = [_usage(command, context), summary, *_paragraphs(description)]
    parameters = [p for p in command.get_params(context) if not getattr(p, "hidden", False)]
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    options = [p for p in parameters if p.param_type_name == "option"]
    parts.append(_section("Arguments", [(value_name(p, context), _text(p, context)) for p in arguments]))
    parts.append(_section("Options", [(_aligned(p, context), _text(p, context)) for p in options]))
    if command.epilog:
        lines = "\n".join(f"  {line}" for line in command.epilog.splitlines())
        parts.append(f"{_bold('Examples:')}\n{lines}")
    return "\n\n".join(filter(None, parts)) + "\n"


def group_page(group: Any, context: Any) -> str:
    """Return the help page of a group: its commands by panel, in the order of registration."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None and not command.hidden:
            panel = command.rich_help_panel or "Commands"
            panels.setdefault(panel, []).append((name, (command.help or "").partition("\n\n")[0]))
    options = [(_aligned(p, context), _text(p, context)) for p in group.get_params(context)]
    parts = [_usage(group, context), group.help or "", *(_section(*panel) for panel in panels.items())]
    return "\n\n".join(filter(None, [*parts, _section("Options", options)])) + "\n"


def option_names(parameter: Any, context: Any) -> str:
    """Return ``-o, --out PATH`` or ``--browser/--no-browser`` of an option."""
    names = sorted(parameter.opts, key=lambda name: (name.startswith("--"), name))
    words = ", ".join(names) + "".join(f"/{name}" for name in parameter.secondary_opts)
    value = value_name(parameter, context)
    return f"{words} {value}" if value else words


def value_name(parameter: Any, context: Any) -> str:
    """Return the placeholder of a value; empty for a flag."""
    if getattr(parameter, "is_flag", False):
        return ""
    if parameter.metavar:
        return str(parameter.metavar)
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    kind = _type_name(parameter, context)
    if "|" in kind:
        return kind
    names = (name for begin, name in _KINDS.items() if kind.startswith(begin))
    return next(names, "TEXT")


def _type_name(parameter: Any, context: Any) -> str:
    # Newer releases of typer describe the type themselves, older ones leave it to click.
    if hasattr(parameter, "display_type"):
        text = str(parameter.display_type(context) or "")
    else:
        choices = getattr(parameter.type, "choices", None)
        text = "|".join(map(str, choices)) if choices else str(parameter.type.name)
    return text.strip("<>").removeprefix("list[").removesuffix("]")


def _usage(command: Any, context: Any) -> str:
    words = [context.command_path]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words += ["[OPTIONS]"] if len(command.get_params(context)) > len(arguments) else []
    for parameter in arguments:
        name = value_name(parameter, context)
        words.append(name if parameter.required else f"[{name}]")
    if hasattr(command, "list_commands"):
        words.append("COMMAND")
    elif context.allow_extra_args:
        words.append("[ARGUMENTS]...")
    return f"{_bold('Usage:')} {' '.join(words)}"


def _aligned(parameter: Any, context: Any) -> str:
    names = option_names(parameter, context)
    return names if not names.startswith("--") else f"    {names}"  # long names line up below one another


def _text(parameter: Any, context: Any) -> str:
    default = parameter.default
    shown = default is not None and default is not False and not callable(default)
    if getattr(parameter, "is_flag", False) or not shown or "default" in (parameter.help or ""):
        return parameter.help or ""
    return f"{parameter.help or ''} [default: {default:g}]" if isinstance(default, float) else (
        f"{parameter.help or ''} [default: {default}]"
    )  # fmt: skip


def _section(title: str, rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    if not rows:
        return ""
    column = min(COLUMN, max(len(name) for name, _ in rows)) + 4
    lines = [_bold(f"{title}:")]
    for name, text in rows:
        wrapped = textwrap.wrap(text, _width() - column) or [""]
        if len(name) + 4 > column:
            lines.append(f"  {_name(name)}")
        else:
            lines.append(f"  {_name(name)}{' ' * (column - 2 - len(name))}{wrapped.pop(0)}".rstrip())
        lines += [f"{' ' * column}{line}" for line in wrapped if line]
    return "\n".join(lines)


def _paragraphs(text: str) -> list[str]:
    return ["\n".join(textwrap.wrap(" ".join(p.split()), _width())) for p in text.split("\n\n") if p.strip()]


def _width() -> int:
    return max(40, min(MAX_WIDTH, shutil.get_terminal_size().columns))


def _bold(text: str) -> str:
    return text if os.environ.get("NO_COLOR") else typer.style(text, bold=True)


def _name(text: str) -> str:
    return text if os.environ.get("NO_COLOR") else typer.style(text, fg="cyan")
