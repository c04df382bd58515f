"""The classes of commands: their examples, and hints for options on the wrong side of a script's name."""

from __future__ import annotations

import sys
from typing import Any

import click

from backlight.launch.script import NoTrainingError
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
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            script = next((word for word in given if word.endswith(".py")), "SCRIPT")
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
        own = {option for parameter in self.params for option in parameter.opts if option.startswith("-")}
        passed = [word for word in ctx.args if word.partition("=")[0] in own]
        # Where the script ignores --fail-on, a CI job would pass whatever is found.
        unwanted = code == USAGE_ERROR or any(word.partition("=")[0] == FAIL_ON for word in passed)
        if unwanted and passed:
            script = next(iter(ctx.params.get(name) for name in ("script", "target") if name in ctx.params))
            write(
                f"backlight: {', '.join(passed)} came after {script}, so the script received it. Options of "
                f"backlight come before the script: {ctx.command_path} {passed[0]} ... {script}",
                file=sys.stderr,
            )
