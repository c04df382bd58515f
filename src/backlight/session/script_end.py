"""How the code that is watched ended: well, or with an exception, where, and which command explains it."""

from __future__ import annotations

import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backlight.distributed import rank_and_size
from backlight.interrupts import suppressed
from backlight.records import Finding
from backlight.redaction import Redaction
from backlight.session.outputs import print_line
from backlight.store.format.manifest import Progress
from backlight.store.read.run import open_run
from backlight.store.write.attempt import wait_for_ranks
from backlight.text import as_typed, count, visible
from backlight.user_code import SourceLine, is_user_code


def print_result(path: Path, findings: Sequence[Finding], steps: int, progress: Progress) -> None:
    """Print the worst finding of the run in ``path``, or that there is none, to standard error, on rank 0."""
    # Here, since panels of the report are imported for it.
    from backlight.report.source import Source  # noqa: PLC0415
    from backlight.report.verdict import outcome, sampled_text  # noqa: PLC0415

    rank, size = rank_and_size()
    if rank != 0:
        return
    run = open_run(path, progress)
    summary = outcome(Source(run, tuple(findings)))
    if summary.tone == "unmeasured":
        text = f"{summary.tally}. {summary.detail}"
    else:
        hints = f" and {count(summary.hints, 'hint')}" if summary.hints else ""
        result = "" if summary.headline in summary.tally else f": {summary.headline}"
        text = f"{summary.tally}{hints} in {count(steps, 'step')}{result}."
        text += f" {summary.lacks}." if summary.lacks else ""
        sampled = sampled_text(run)
        text += f" Recorded: {sampled}." if sampled else ""
    text += "".join(f" {withdrawal.text}" for withdrawal in summary.withdrawn)
    if size > 1 and not wait_for_ranks(path, 0.0):
        text += " Other ranks have not ended."
    print_line(f"{text} Next: backlight report {visible(shlex.quote(as_typed(path)))}", sys.stderr)


MAX_MESSAGE = 2000
"""Characters of the message of an exception that are kept."""

_EXPLAINED = (
    (
        re.compile(
            r"does not require grad|does not have a grad_fn|modified by an inplace operation"
            r"|backward through the graph a second time|not have been used in the graph"
            r"|finished reduction in the prior iteration"
        ),
        "why-no-grad",
    ),
    (re.compile(r"^CheckpointError: |torch\.utils\.checkpoint: "), "check --recompute"),
    (re.compile(r"returned nan values in its"), "nan"),
    (re.compile(r"^OutOfMemoryError: |out of memory|(not enough|can't allocate) memory"), "memory"),
)
"""Exceptions of torch by type and message, and the command that explains them."""


def failure(error: BaseException | None) -> BaseException | None:
    """Return the exception of code that failed; None where it ended, or left by ``sys.exit(0)``.

    For code that leaves with an error because it is interrupted, as Lightning does, that is the interrupt.
    """
    if not isinstance(error, SystemExit):
        return error
    if error.code is None or (isinstance(error.code, int) and not error.code):
        return None
    return error.__context__ if isinstance(error.__context__, KeyboardInterrupt) else error


def uncaught_exception() -> BaseException | None:
    """Return the exception that ends this process, None where it ends well; for functions called at exit.

    An interactive interpreter goes on after an exception, so that the last one shows nothing about its end.
    """
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def description(error: BaseException, redact: tuple[str, ...]) -> dict[str, Any]:
    """Return type and message of an exception, the user's line that led to it, and what explains it.

    ``in_backward`` is whether a backward pass raised it, ``explained_by`` a command, empty where none fits.
    """
    kind, text = type(error).__name__, ""
    with suppressed():  # code of the script
        text = str(error)
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [SourceLine(code.co_filename, line) for code, line in frames if is_user_code(code.co_filename)]
    commands = [command for pattern, command in _EXPLAINED if pattern.search(f"{kind}: {text}")]
    return {
        "type": kind,
        "message": Redaction(redact).text(text[: 2 * MAX_MESSAGE])[:MAX_MESSAGE],
        "line": str(lines[-1]) if lines else "",
        "in_backward": any(code.co_name == "_engine_run_backward" for code, _ in frames),
        "explained_by": next(iter(commands), ""),
    }


def summary_of(error: BaseException, line: str) -> str:
    """Return what ended a script as ``the script ended with ValueError at train.py:12``."""
    if isinstance(error, KeyboardInterrupt):
        return "the script was interrupted"
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return f"the script ended with exit code {code}"
    return f"the script ended with {type(error).__name__}" + (f" at {line}" if line else "")
