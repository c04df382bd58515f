"""Exceptions that a signal handler of the script raises while backlight runs: they belong to the script.

Python calls a handler between two instructions of the main thread, whatever runs there. What the handler
raises passes through that code, and plain Python would deliver it to the training loop.
"""

from __future__ import annotations

import ctypes
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

from backlight import clock
from backlight.threads import BackgroundThread

POLL_S = 0.001
"""Seconds between two looks at whether a callback has returned."""

_LOOKS_AT_REST = 20
"""Looks in a row that see no callback, after which an instruction that goes on is a call of compiled code."""


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal handler raised ``error``; for the ``except`` that has caught it.

    An exception that was raised in place of such a one, as a library does that wraps errors, is one as well.
    """
    passed = set(_frames(error.__traceback__))
    seen = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        # One that the script handles at the moment, further out, is not passing through here.
        frames = list(_frames(current.__traceback__))
        if not passed.intersection(frames[:1]):
            return False
        if any(_is_of_handler(frame) for frame in frames):
            return True
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return False


class suppressed:  # noqa: N801 - used as contextlib.suppress is
    """Suppress every exception that is no interrupt of the script, as ``contextlib.suppress(Exception)``."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> bool:
        return isinstance(error, Exception) and not is_interrupt(error)


def call_from_callback(function: Callable[[], object]) -> None:
    """Call ``function`` in a callback of which Python drops every exception: those of a signal handler.

    Such an exception is raised again in this thread, by another one, once the instruction that has called
    the callback is over: until then Python may call further callbacks, and would drop it in one of them.
    """
    try:
        function()
    except BaseException as error:
        if isinstance(error, Exception) and not is_interrupt(error):
            raise
        callback = sys._getframe(1)
        arguments = error, threading.get_ident(), callback, callback.f_back and callback.f_back.f_lasti
        BackgroundThread(target=_raise_outside, name="backlight-interrupt", args=arguments).start()


def _raise_outside(error: BaseException, ident: int, callback: FrameType, instruction: int | None) -> None:
    def carried(_: type[BaseException]) -> BaseException:
        return error

    # Python takes a class, and raises what a call of it returns.
    carrier = type("Carrier", (BaseException,), {"__new__": carried})
    script = callback.f_back
    looks_at_rest = 0
    while True:
        stack = list(_stack(sys._current_frames().get(ident)))
        if callback not in stack:
            if script is None or script not in stack or script.f_lasti != instruction:
                break
            # A long call of compiled code: no callback runs.
            looks_at_rest = looks_at_rest + 1 if stack[0] is script else 0
            if looks_at_rest == _LOOKS_AT_REST:
                break
        clock.sleep(POLL_S)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(carrier))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames(stack: TracebackType | None) -> Iterator[FrameType]:
    while stack is not None:
        yield stack.tb_frame
        stack = stack.tb_next


def _is_of_handler(frame: FrameType) -> bool:
    """Return whether a frame is a call of a signal handler: it is given the frame that it interrupts."""
    back, code = frame.f_back, frame.f_code
    if back is None:
        return False
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    names = code.co_varnames[:count]
    arguments = [frame.f_locals.get(name) for name in names]
    arguments += [part for value in arguments if type(value) is tuple for part in value]
    return any(value is back for value in arguments) or code in _registered()


def _registered() -> set[CodeType]:
    """Return the code of all signal handlers: one may have overwritten its arguments."""
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        handler = getattr(handler, "func", handler)  # a partial
        code = getattr(handler, "__code__", None)  # of a method as well
        if isinstance(code, CodeType):
            codes.add(code)
    return codes
