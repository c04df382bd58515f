"""What the first steps of a script confirm and withdraw of the hints that were read in its files."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, Self

from backlight.launch.reading.hint import Hint
from backlight.records import Finding

STEPS = 10
"""Optimizer steps that a script with hints is watched for, where the user asks for none."""


class HintOutcome(StrEnum):
    """``CONFIRMED`` and ``WITHDRAWN`` are answers of the run; a ``NOT_REACHED`` line has not run."""

    CONFIRMED = "confirmed"
    NOT_CONFIRMED = "not confirmed"
    WITHDRAWN = "withdrawn"
    NOT_REACHED = "not reached"


@dataclass(frozen=True)
class HintResult:
    """A hint, the answer of the run, and the title of the finding that confirms it."""

    hint: Hint
    outcome: HintOutcome
    finding: str = ""

    @property
    def is_shown(self) -> bool:
        """Whether the user sees it: what the run has withdrawn is never shown."""
        unanswered = self.outcome is HintOutcome.NOT_CONFIRMED and not self.hint.needs_run
        return unanswered or self.outcome is HintOutcome.CONFIRMED


class ReachedLines:
    """Notes which lines of hints run; a context manager around the script.

    Where a debugger or a coverage tool traces already, every line counts as reached.
    """

    def __init__(self, hints: Collection[Hint]) -> None:
        self._lines: dict[str, set[int]] = {}
        for hint in hints:
            self._lines.setdefault(str(Path(hint.path).resolve()), set()).add(hint.line)
        self._files: dict[str, set[int] | None] = {}
        self._reached: set[tuple[str, int]] = set()
        self._is_traced = not hints or sys.gettrace() is not None

    def __enter__(self) -> Self:
        """Start."""
        if not self._is_traced:
            sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        if not self._is_traced:
            sys.settrace(None)

    def __contains__(self, hint: Hint) -> bool:
        """Return whether the line of a hint has run."""
        return self._is_traced or (str(Path(hint.path).resolve()), hint.line) in self._reached

    def _on_call(self, frame: FrameType, event: str, _argument: Any) -> Any:
        path = frame.f_code.co_filename
        if path not in self._files:
            self._files[path] = self._lines.get(str(Path(path).resolve()))
        return self._on_line if self._files[path] else None

    def _on_line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        path = frame.f_code.co_filename
        if event == "line" and frame.f_lineno in (self._files[path] or ()):
            self._reached.add((str(Path(path).resolve()), frame.f_lineno))
        return self._on_line


def settle(
    hints: Sequence[Hint], findings: Sequence[Finding] | None, reached: ReachedLines, steps: int
) -> list[HintResult]:
    """Return the hints with the answer of a run of ``steps`` optimizer steps.

    A finding of one of its rules confirms a hint. Its line has run and no rule reports it: the hint is
    withdrawn, if the rules had enough steps. Without ``findings`` nothing was evaluated.
    """
    results = []
    for hint in hints:
        titles = [each.title for each in findings or () if each.rule in hint.rules]
        if hint not in reached:
            outcome = HintOutcome.NOT_REACHED
        elif titles:
            outcome = HintOutcome.CONFIRMED
        elif findings is not None and 0 < hint.steps <= steps:
            outcome = HintOutcome.WITHDRAWN
        else:
            outcome = HintOutcome.NOT_CONFIRMED
        results.append(HintResult(hint, outcome, titles[0] if titles else ""))
    return results


def hint_lines(results: Sequence[HintResult]) -> list[str]:
    """Return the hints that are shown, confirmed ones first, each with its source and a caret line."""
    lines = []
    for result in sorted(results, key=lambda each: each.outcome is not HintOutcome.CONFIRMED):
        if result.is_shown:
            confirmed = result.outcome is HintOutcome.CONFIRMED
            head = f"confirmed: {result.finding}" if confirmed else "hint, not confirmed"
            lines += [head, *(f"  {line}" for line in result.hint.view())]
    return lines
