"""The exception that ends a script, handed to the interpreter as it came."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from typing import NoReturn

from backlight import clock
from backlight.launch.main_module import forget_file
from backlight.standard_error import write_text

COPY_S = 5.0
"""Seconds after an interrupt within which torchrun sends the same one again."""


class Interrupted(BaseException):
    """Carries the interrupt that ended a script past the command line, which would report one of its own."""

    def __init__(self, error: KeyboardInterrupt) -> None:
        super().__init__()
        self.error: KeyboardInterrupt | None = error


def raise_interrupt(ended: Interrupted) -> NoReturn:
    """Raise the interrupt that ended a script, as the last act of the main program.

    The interpreter then does what it does without backlight: it prints the traceback, joins threads, calls
    what is registered at exit, and ends the process by the same signal.
    """
    error, hook = ended.error, sys.excepthook
    assert error is not None
    stack, ended.error = error.__traceback__, None

    def show_once(_kind: object, error: BaseException, _stack: object) -> None:
        sys.excepthook = hook
        show(error.with_traceback(stack))  # without the frames that are between here and the interpreter

    sys.excepthook = show_once
    try:
        raise error
    finally:
        del error  # nothing but the interpreter keeps the frames of the script, and the files open in them


def show(error: BaseException) -> None:
    """Print an exception as the interpreter does, and leave it where the interpreter leaves it."""
    stack = error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, stack
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    failed = "" if hasattr(sys, "excepthook") else "sys.excepthook is missing\n"
    try:
        if not failed:
            sys.excepthook(type(error), error, stack)
    except Exception as raised:  # noqa: BLE001 - a broken hook of the script still leaves a traceback
        own = raised.__traceback__ and raised.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(raised), raised, own))
        failed = f"Error in sys.excepthook:\n{text}\nOriginal exception was:\n"
    if failed:
        text = "".join(traceback.format_exception(type(error), error, stack))
        write_text(failed + text, sys.stderr)
    forget_file()


@contextlib.contextmanager
def copy_ignored() -> Iterator[None]:
    """Ignore one further interrupt within :data:`COPY_S` under torchrun, and none elsewhere.

    A terminal interrupts torchrun and its workers, and torchrun then interrupts its workers.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or handler is not signal.default_int_handler or "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    began = clock.monotonic()

    def ignore_once(number: int, frame: types.FrameType | None) -> None:
        signal.signal(signal.SIGINT, handler)
        if clock.monotonic() - began > COPY_S:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, ignore_once)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is ignore_once:
            signal.signal(signal.SIGINT, handler)
