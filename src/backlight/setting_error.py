"""The error of a setting that cannot be used, worded for Python or for the command line."""

from __future__ import annotations

import re
from collections.abc import Callable


class SettingError(ValueError):
    """A setting has a value that cannot be used.

    Parameters
    ----------
    setting:
        The field of :class:`backlight.session.settings.Settings`.
    problem:
        What is wrong, and what was expected; other settings are named in braces, as ``{every}``.
    """

    def __init__(self, setting: str, problem: str) -> None:
        self.setting, self._problem = setting, problem
        super().__init__(self.worded(str))

    def worded(self, name_of: Callable[[str], str]) -> str:
        """Return the message with each setting called as ``name_of`` returns it."""
        problem = re.sub(r"\{([a-z_]+)\}", lambda found: name_of(found[1]), self._problem)
        return f"{name_of(self.setting)}: {problem}"
