"""What a signal handler of the script raises reaches the script, wherever in backlight it runs."""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import backlight
from backlight.capture.hub import HUB, Listener
from backlight.interrupts import is_interrupt, suppressed

SOURCE = Path(backlight.__file__).parent


RAISED = "raised by a handler"


class TimeUpError(Exception):
    """Raised by the handlers of these tests."""


def handler(number: int, frame: FrameType | None) -> None:
    raise TimeUpError


def any_arguments(*_: Any) -> None:
    raise TimeUpError


def overwriting(number: int, frame: FrameType | None) -> None:
    frame = None  # noqa: F841 - the point of it
    raise TimeUpError


@functools.wraps(handler)
def decorated(*given: Any) -> None:
    handler(*given)


class Timer:
    def expire(self, number: int, frame: FrameType | None) -> None:
        self.stop(1)

    def stop(self, code: int) -> None:
        raise TimeUpError

    __call__ = expire


def removing_itself(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    raise TimeUpError


def raising(error: type[Exception]) -> Callable[[int, FrameType | None], None]:
    def raise_it(number: int, frame: FrameType | None) -> None:
        raise error(RAISED)

    return raise_it


HANDLERS: dict[str, Callable[[int, FrameType | None], Any]] = {
    "function": handler,
    "any arguments": any_arguments,
    "overwriting its arguments": overwriting,
    "decorated": decorated,
    "method": Timer().expire,
    "object": Timer(),
    "partial": functools.partial(any_arguments, "first"),
    "removing itself": removing_itself,
    "lambda": lambda *_: Timer().stop(1),
    "RuntimeError": raising(RuntimeError),
    "OSError": raising(OSError),
    "AssertionError": raising(AssertionError),
}


@pytest.fixture(autouse=True)
def _handler_is_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, before)


def library(wraps: type[Exception] | None) -> None:
    """Call something that a signal interrupts, as code of a library that may wrap errors."""
    try:
        signal.raise_signal(signal.SIGALRM)
    except Exception as error:
        if wraps is None:
            raise
        raise wraps("of the library") from error


@pytest.mark.parametrize("wraps", [None, KeyError])
@pytest.mark.parametrize("name", HANDLERS)
def test_interrupts_are_recognised_by_their_origin(name: str, wraps: type[Exception] | None) -> None:
    signal.signal(signal.SIGALRM, HANDLERS[name])
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of each kind
        library(wraps)
    assert is_interrupt(raised.value)
    signal.signal(signal.SIGALRM, HANDLERS[name])
    with pytest.raises(Exception), suppressed():  # noqa: B017, PT011 - of each kind
        library(wraps)


@pytest.mark.parametrize("number", [1, signal.SIGALRM])
def test_errors_of_backlight_are_no_interrupts(number: int) -> None:
    signal.signal(signal.SIGALRM, handler)
    with pytest.raises(TimeUpError) as raised:
        Timer().stop(number)
    assert not is_interrupt(raised.value)
    with suppressed():
        raise ValueError


def test_error_while_the_script_handles_its_interrupt_is_none() -> None:
    signal.signal(signal.SIGALRM, handler)

    def observe() -> bool:
        try:
            raise KeyError
        except KeyError as error:
            return is_interrupt(error)

    try:
        signal.raise_signal(signal.SIGALRM)
    except TimeUpError:
        assert observe() is False


def test_other_listeners_get_the_event_and_modes_are_restored() -> None:
    class Interrupted(Listener):
        def batch_missing(self) -> None:
            torch.set_grad_enabled(False)
            signal.raise_signal(signal.SIGALRM)

    class Other(Listener):
        count = 0

        def batch_missing(self) -> None:
            self.count += 1

    signal.signal(signal.SIGALRM, handler)
    interrupted, other = Interrupted(), Other()
    HUB.add(interrupted)
    HUB.add(other)
    try:
        with pytest.raises(TimeUpError) as raised:
            HUB.emit("batch_missing")
        assert raised.value.__context__ is None
        assert other.count == 1
        assert torch.is_grad_enabled()
        assert interrupted in HUB.listeners, "it has done nothing wrong"
    finally:
        HUB.remove(interrupted)
        HUB.remove(other)


OWN = str(SOURCE)


ERRORS = [TimeUpError, TimeoutError, RuntimeError, AttributeError]


class Training:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.steps = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 4)).square().mean().backward()
        self.optimizer.step()
        self.steps += 1


def interrupted_call(function: Callable[[], object], at: int) -> tuple[int, str]:
    """Call something, interrupted as call ``at`` of backlight begins; return how many began, and the last.

    Generators are left out: Python delivers no signal in one that is being closed. So are finalizers of what
    earlier tests have left, in which Python ignores every exception: nothing is collected meanwhile.
    """
    count, last = 0, ""
    gc.disable()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count, last
        code = frame.f_code
        is_function = event == "call" and not code.co_flags & inspect.CO_GENERATOR
        if is_function and code.co_filename.startswith(OWN):
            count += 1
            last = code.co_qualname
            if count == at:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGALRM)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count, last


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("every", [1, 1000])
def test_interrupt_at_every_call_of_a_step_reaches_the_loop(
    every: int, error: type[Exception], tmp_path: Path
) -> None:
    signal.signal(signal.SIGALRM, raising(error))
    training = Training()
    with warnings.catch_warnings(), backlight.watch(
        training.model, training.optimizer, run=tmp_path / "run", every=every, quiet=True
    ):  # fmt: skip
        warnings.simplefilter("error")
        for _ in range(40):
            training.step()
        calls, at = 1, 0
        while at < calls:
            at += 1
            calls, last = interrupted_or_whole(training.step, at)
            assert torch.is_grad_enabled(), last
            training.step()  # the loop can go on
        for _ in range(10):
            training.step()
    assert at > (100 if every == 1 else 4)
    run = backlight.open_run(tmp_path / "run")
    assert run.status.value == "finished"
    assert run.last_step() + 1 >= training.steps


@pytest.mark.slow
def test_interrupt_where_counting_ends_loses_no_step(tmp_path: Path) -> None:
    """At each call of backlight while a stretch of unrecorded steps ends."""
    signal.signal(signal.SIGALRM, raising(TimeUpError))
    training = Training()
    with backlight.watch(
        training.model, training.optimizer, run=tmp_path / "run", every=1000, quiet=True
    ):  # fmt: skip
        calls, at = 1, 0
        while at < calls:
            at += 1
            for _ in range(200):
                training.step()
                if HUB.unrecorded is not None and HUB.unrecorded.done == 5:
                    break
            assert HUB.unrecorded is not None
            calls, _ = interrupted_or_whole(HUB.resume, at)
    assert at > 4
    assert backlight.open_run(tmp_path / "run").last_step() + 1 == training.steps


def interrupted_or_whole(function: Callable[[], object], at: int) -> tuple[int, str]:
    """Return the calls of a function, at least ``at + 1`` where it was interrupted, and the last of them."""
    try:
        calls, last = interrupted_call(function, at)
    except tuple(ERRORS) as raised:
        if str(raised) != RAISED:
            raise
        return at + 1, f"call {at}"
    assert calls < at, f"swallowed in {last}"
    return calls, last


APART = {
    "capture/forked_child.py": "in a forked child",
    "store/write/database.py": "reads the text of an error",
    "store/write/watchdog.py": "in the watchdog process",
    "watchdog": "in the watchdog process, or in a command",
    "monitors/stalls/instrument/stack_sampler.py": "in a thread",
    "monitors/spectra/instrument/worker_thread.py": "in a thread",
    "session/writer_thread.py": "in a thread",
    "session/rank_norm_monitor.py": "in a thread",
    "session/trackers": "in a thread or a command",
    "integrations/pytest_plugin.py": "raises",
}

ON_THE_TRAINING_THREAD = (
    "capture",
    "session",
    "measure",
    "monitors",
    "integrations",
    "findings",
    "store/write",
)


def catches_everything(node: ast.AST) -> bool:
    """Return whether a node catches exceptions of any type, and does not let interrupts through."""
    if isinstance(node, ast.ExceptHandler):
        names = {one.id for one in ast.walk(node.type) if isinstance(one, ast.Name)} if node.type else set()
        if node.type is not None and not names & {"Exception", "BaseException"}:
            return False
        inside = [one for line in node.body for one in ast.walk(line)]
        is_asked = any(isinstance(one, ast.Name) and one.id == "is_interrupt" for one in inside)
        return not is_asked and not any(isinstance(one, ast.Raise) for one in inside)
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("suppress")
        and any(ast.unparse(one) in {"Exception", "BaseException"} for one in node.args)
    )


@pytest.mark.slow
def test_no_shield_on_the_training_thread_catches_interrupts() -> None:
    folders = [SOURCE / name for name in ON_THE_TRAINING_THREAD]
    files = [*SOURCE.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    found = []
    for path in files:
        name = path.relative_to(SOURCE).as_posix()
        lines = [n.lineno for n in ast.walk(ast.parse(path.read_text())) if catches_everything(n)]
        found += [] if name.startswith(tuple(APART)) else [f"{name}:{line}" for line in lines]
    assert not found, "ask is_interrupt(error) first, or use suppressed()"


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("try: f()\nexcept Exception: pass", True),
        ("try: f()\nexcept: pass", True),
        ("try: f()\nexcept (OSError, Exception) as error: g(error)", True),
        ("with contextlib.suppress(Exception): f()", True),
        ("try: f()\nexcept Exception as error:\n if is_interrupt(error): raise\n g()", False),
        ("try: f()\nexcept BaseException:\n g()\n raise", False),
        ("try: f()\nexcept OSError: pass", False),
        ("with contextlib.suppress(OSError), suppressed(): f()", False),
    ],
)
def test_the_rule_about_shields_finds_each(code: str, is_found: bool) -> None:
    assert any(catches_everything(node) for node in ast.walk(ast.parse(code))) is is_found
