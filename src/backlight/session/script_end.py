"""How the code that is watched ended: well, or with an exception."""

from __future__ import annotations

import sys


def failure(error: BaseException | None) -> BaseException | None:
    """Return the exception of code that failed; None where it ended, or left by ``sys.exit(0)``.

    For code that leaves with an error because it is interrupted, as Lightning does, that is the interrupt.
    """
    if not isinstance(error, SystemExit):
        return error
    if error.code in {None, 0}:
        return None
    return error.__context__ if isinstance(error.__context__, KeyboardInterrupt) else error


def uncaught_exception() -> BaseException | None:
    """Return the exception that ends this process, None where it ends well; for functions called at exit.

    An interactive interpreter goes on after an exception, so that the last one shows nothing about its end.
    """
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
