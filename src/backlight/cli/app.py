"""The ``backlight`` command: the modules of :mod:`backlight.cli.commands` declare its commands."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import backlight
from backlight.extras import EXTRA_OF, MissingPackageError
from backlight.launch.script import Interrupted, NoTrainingError, raise_interrupt
from backlight.registry import UnknownNameError
from backlight.store.errors import StoreError
from backlight.terminal import write

USAGE_ERROR = 2
"""Exit code of argparse and click where they refuse the arguments."""

FAIL_ON = "--fail-on"


class ExampleCommand(click.Command):
    """A command whose help ends with its epilog: examples, one a line."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they are typed."""
        if self.epilog:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.epilog.splitlines()))


class ScriptCommand(ExampleCommand):
    """A command whose first argument is a script; what follows it belongs to the script, as in ``python``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options in front of the script; name the place of others."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            script = next((word for word in words if word.endswith(".py")), "SCRIPT")
            line = f"{ctx.command_path} {script} {error.option_name}"
            message = (
                f"No such option {error.option_name!r}; options of the script come after its name: {line} ..."
            )
            raise click.NoSuchOption(error.option_name, message, ctx=ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; name options of backlight that the script received, where it may not want them."""
        try:
            code = super().invoke(ctx)
        except NoTrainingError as error:
            self._note_own_options(ctx, error.exit_code)
            raise
        self._note_own_options(ctx, code if self.name == "run" else None)
        return code

    def _note_own_options(self, ctx: click.Context, code: object) -> None:
        options = {option for parameter in self.params for option in parameter.opts if option.startswith("-")}
        passed = [word for word in ctx.args if word.partition("=")[0] in options]
        # Where the script ignores --fail-on, a CI job would pass whatever is found.
        unwanted = code == USAGE_ERROR or any(word.partition("=")[0] == FAIL_ON for word in passed)
        if unwanted and passed:
            script = next(iter(ctx.params.get(name) for name in ("script", "target") if name in ctx.params))
            write(
                f"backlight: {', '.join(passed)} came after {script}, so the script received it. Options of "
                f"backlight come before the script: {ctx.command_path} {passed[0]} ... {script}",
                file=sys.stderr,
            )


PANELS = {
    "Start": ("run", "report", "open", "top", "doctor", "demo"),
    "Diagnose": (
        "why-no-grad", "check", "nan", "attach", "profile", "trace", "test-matrix", "memory",
    ),
    "Runs": ("ls", "findings", "explain", "compare", "query", "export", "compact", "join", "mcp"),
    "Research": ("spectra", "sweep", "gram", "grok"),
}  # fmt: skip
"""Commands by group, in the order of ``--help``; each group is a module of :mod:`backlight.cli.commands`."""

MEANT = {
    ("gop", "outer-product", "gradient-outer-product", "gradient-outer-products", "gramian", "fisher"): (
        "gram", "the exact Gram of per-sample gradients, with the spectrum of the gradient outer product"
    ),
    ("agop", "ntk", "influence"): (
        "grok run", "records it during training; any script: `backlight.watch(..., samples=...)`"
    ),
    ("echo", "spectral-echo", "svd", "spectrum", "replicates"): (
        "spectra", "singular directions of replicate gradients, with the spectral echo"
    ),
    ("noise-scale", "noise", "gns", "critical-batch-size"): (
        "run --set spectra.noise_scale=0", "records the gradient noise scale; `spectra` measures it by layer"
    ),
    ("dry-run", "dryrun", "estimate"): (
        "memory predict", "the memory of a step without running it; experiments: `grok run NAME --dry-run`"
    ),
    ("no-grad", "no-gradient", "missing-gradients", "unused", "unused-parameters"): (
        "why-no-grad", "which parameters get no gradient, and why"
    ),
    ("hang", "stuck", "stalls", "deadlock"): ("attach", "where a running process is stuck"),
    ("health", "gradients", "watch", "train"): ("run", "watches a training script"),
}  # fmt: skip
"""Names that researchers type, with the command that they mean and what it does."""

REFUSALS = (ValueError, OSError, StoreError, UnknownNameError, ModuleNotFoundError)
"""Errors whose message names what, where, expected, got and the fix."""

_EXHAUSTED = (RecursionError, MemoryError)

_CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True}


class Group(click.Group):
    """A group that prints its help where no command is named: that is not an error.

    ``default`` is the command that is meant where the first word is none: ``memory train.py`` is
    ``memory measure train.py``.
    """

    def __init__(self, *args: Any, default: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print the help without arguments, and name the default command."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        if self.default and args and args[0] not in {*self.list_commands(ctx), *ctx.help_option_names}:
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command that is named; for an unknown name, an error with the one that is meant."""
        name = str(args[0])
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            ctx.fail(f"No such command {name!r}{_meant(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


def _meant(name: str, commands: list[str]) -> str:
    """Return which command an unknown name may mean, for the end of a message."""
    plain = name.lower().replace("_", "-")
    names = {synonym: meant for synonyms, meant in MEANT.items() for synonym in synonyms}
    if plain in names:
        command, what = names[plain]
        return f"; use backlight {command}: {what}"
    close = difflib.get_close_matches(plain, [*commands, *names], n=1)
    if not close:
        return ""
    return f"; did you mean {close[0]!r}?" if close[0] in commands else _meant(close[0], commands)


@functools.cache
def _modules() -> list[str]:
    return [file.stem for file in (Path(__file__).parent / "commands").glob("*.py")]


class Panels(Group):
    """The commands by panel; each is imported when it is named, so that a watched script starts sooner."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of :data:`PANELS`."""
        return [name for names in PANELS.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command: that of its own name, or that of its panel."""
        panel = next((panel for panel, names in PANELS.items() if cmd_name in names), None)
        if panel is not None:
            name = cmd_name.replace("-", "_")
            modules = [stem for stem in _modules() if stem == name or stem.startswith(f"{name}_")]
            for module in modules or [panel.lower()]:
                importlib.import_module(f"backlight.cli.commands.{module}")
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each panel."""
        for panel, names in PANELS.items():
            with formatter.section(panel):
                commands = [(name, self.get_command(ctx, name)) for name in names]
                formatter.write_dl(
                    [(n, c.get_short_help_str(limit=80)) for n, c in commands if c is not None]
                )


def all_commands() -> dict[str, click.Command]:
    """Return every command by its full name, as ``grok run``."""
    context = click.Context(app, info_name="backlight")
    commands: dict[str, click.Command] = {}
    for name in app.list_commands(context):
        command = app.get_command(context, name)
        if isinstance(command, click.Group):
            commands |= {f"{name} {inner}": each for inner, each in sorted(command.commands.items())}
        elif command is not None:
            commands[name] = command
    return commands


def _version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        write(f"backlight {backlight.__version__}")
        context.exit()


@click.group(
    "backlight", cls=Panels, context_settings=_CONTEXT,
    help="See inside the backward pass of any PyTorch training, unchanged.",
)  # fmt: skip
@click.option("--version", "-V", is_flag=True, is_eager=True, callback=_version, help="Print the version.")
@click.option("--traceback", is_flag=True, help="Print the traceback of an error, not one line.")
@click.pass_context
def app(context: click.Context, /, **options: bool) -> None:
    """Take the options in front of a command."""
    context.obj = options


grok = Group("grok", help="Run experiments on grokking and diagnose grokking in runs.")
memory = Group(
    "memory", default="measure",
    help="Measure the memory of a step of a script, or predict that of a recipe.",
)  # fmt: skip
app.add_command(grok)
app.add_command(memory)


def command(name: str, *examples: str, group: click.Group = app, script: bool = False) -> Callable[..., Any]:
    """Register a function as a command.

    Parameters
    ----------
    name:
        Its name, in :data:`PANELS` or in ``group``.
    examples:
        Command lines that its ``--help`` shows.
    group:
        ``grok`` or ``memory`` for a command of that group.
    script:
        Whether what follows the first argument belongs to the user's script, as in ``python``.
    """

    def register(function: Callable[..., Any]) -> click.Command:
        return group.command(
            name, cls=ScriptCommand if script else ExampleCommand,
            help=inspect.cleandoc(function.__doc__ or ""), epilog="\n".join(examples),
            context_settings={"allow_extra_args": script, "allow_interspersed_args": not script},
        )(function)  # fmt: skip

    return register


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


def _usage_line(error: click.ClickException) -> str:
    """Return the line for wrong arguments, with what to type next."""
    text, context = error.format_message(), getattr(error, "ctx", None)
    text = text if text.endswith("...") else text.removesuffix(".")
    if context is None or text.endswith("?"):  # it suggests a command already
        return text
    if isinstance(context.command, click.Group) and not isinstance(error, click.BadParameter):
        return f"{text}; {context.command_path} --help lists the commands"
    example, *_ = (context.command.epilog or "").splitlines() or [""]
    return f"{text}, as in: {example}" if example and isinstance(error, click.MissingParameter) else text


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit.

    Exit code 0 is done, 1 is what the user asked to fail on, 2 is an error, reported in one line; a watched
    script exits with its own code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    code: object = 0
    interrupt: Interrupted | None = None
    name = next((word for word in arguments if word != "--traceback"), "")
    try:
        code = app.main(arguments, prog_name="backlight", standalone_mode=False)
    except Interrupted as ended:
        interrupt = ended
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
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
