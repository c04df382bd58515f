"""Commands that run the user's script: hints for options on the wrong side of the script's name."""

from __future__ import annotations

import sys
from typing import Any

from backlight.cli.help_page import HelpCommand
from backlight.launch.script import NoTrainingError
from backlight.terminal import write

USAGE_ERROR = 2
"""Exit code of argparse and click where they refuse the arguments."""

FAIL_ON = "--fail-on"


class ScriptCommand(HelpCommand):
    """A command whose first argument is a script; what follows it belongs to the script, as in ``python``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options in front of the script; name the place of others."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            unknown = getattr(error, "option_name", None)
            if isinstance(unknown, str) and type(error).__name__ == "NoSuchOption":
                script = next((word for word in given if word.endswith(".py")), "SCRIPT")
                line = f"{ctx.command_path} {script} {unknown}"
                problem: Any = error
                problem.message = (
                    f"{problem.format_message()}; options of the script come after its name: {line} ..."
                )
                problem.possibilities = None
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command; name options of backlight that the script received, where it may not want them."""
        try:
            code = super().invoke(ctx)
        except NoTrainingError as error:
            self._note_own_options(ctx, error.exit_code)
            raise
        self._note_own_options(ctx, code if self.name == "run" else None)
        return code

    def _note_own_options(self, ctx: Any, code: object) -> None:
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
