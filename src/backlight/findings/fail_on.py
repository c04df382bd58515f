"""The value of ``--fail-on``: a severity, names of rules, or both, separated by commas."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from backlight.records import Finding, Severity
from backlight.registry import RULES


class FailOnError(ValueError):
    """A name in ``--fail-on`` that is neither a severity nor a rule."""


def parse_fail_on(text: str) -> Callable[[Finding], bool]:
    """Return a predicate that is true of findings that ``text`` names.

    Parameters
    ----------
    text:
        Such as ``"warning"`` (that severity and above) or ``"non_finite,spike"``.

    Raises
    ------
    FailOnError
        If a name is unknown, or there is none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [*(severity.value for severity in Severity), *RULES]
    if not names:
        raise FailOnError("--fail-on: expected a severity or names of rules, such as 'warning' or 'spike'")
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
            raise FailOnError(f"--fail-on: no severity or rule is called {name!r}; {hint}")
    ranks = [severity.rank for severity in Severity if severity.value in names]
    return lambda finding: finding.rule in names or any(finding.severity.rank >= rank for rank in ranks)
