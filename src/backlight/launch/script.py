"""Run a training script as Python would, under a context manager.

The script's exit code, output, exceptions and signals are its own; what backlight has to say goes
to standard error after it.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import runpy
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from importlib.abc import Loader
from pathlib import Path
from typing import NoReturn, TypeVar, cast

from backlight import clock
from backlight.standard_error import write_text
from backlight.user_code import STDIN_FILE

STANDARD_INPUT = "-"
"""The target that stands for a program on standard input."""

IS_LAZY = sys.version_info >= (3, 14)
"""Whether annotations of a module are made when they are asked for, so that it begins without any."""

PLAIN_DEPTH = -3
"""What :func:`_depth` returns to the main program of an interpreter that runs nothing else."""

RUN_MODULE = getattr(runpy, "_run_module_as_main", None)
"""What the interpreter itself calls for ``-m``, directories and archives."""


def run_as_main(target: str, *, module: bool) -> None:
    """Run a file, a directory or archive with ``__main__``, a module or standard input as ``__main__``.

    The recursion limit is raised by what the frames below the script take of it, so that it recurses as deep
    as without them. Raises what the script raises.
    """
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if not IS_LAZY:
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    is_container = not module and target != STANDARD_INPUT and pkgutil.get_importer(target) is not None
    leave_own_path(target, module=module, is_container=is_container)
    if (module or is_container) and RUN_MODULE is not None:
        with _untraced():
            depth = _depth()
        # And this frame, where the interpreter calls runpy itself.
        with _raised_limit(PLAIN_DEPTH - depth + 1):
            RUN_MODULE(target if module else "__main__", module)
    elif module or is_container:
        name = target if module else "__main__"
        runpy.run_module(name, {"__builtins__": builtins}, "__main__", alter_sys=True)
    else:
        code, measured = _code(target, main), {"depth": _depth}
        with _untraced():
            exec("found = depth()", measured)
        with _raised_limit(PLAIN_DEPTH - cast("int", measured["found"])):
            exec(code, main.__dict__)


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Take away what traces the process, as coverage: at the recursion limit it would raise, and be lost."""
    tracer = sys.gettrace()
    if tracer is not None:
        sys.settrace(None)
    try:
        yield
    finally:
        if tracer is not None:
            sys.settrace(tracer)


@contextlib.contextmanager
def _raised_limit(frames: int) -> Iterator[None]:
    """Raise the recursion limit, and restore it unless the script has set one of its own."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + frames)
    try:
        yield
    finally:
        if sys.getrecursionlimit() == before + frames:
            sys.setrecursionlimit(before)


def forget_file() -> None:
    """Delete the file of the main module, as the interpreter does where it ended without an exit code."""
    main = vars(sys.modules["__main__"])
    if main.get("__spec__") is None:
        for name in ("__file__", "__cached__"):
            main.pop(name, None)


def leave_own_path(target: str, *, module: bool, is_container: bool = False) -> None:
    """Put first on the path what ``python`` does for a target, in place of what it did for backlight."""
    here = str(Path.cwd())
    added = {str(Path(word).resolve().parent) for word in sys.orig_argv[1:2]} | {here, ""}
    if not sys.flags.safe_path and sys.path[:1] and sys.path[0] in added:
        del sys.path[0]
    if is_container:
        sys.path.insert(0, _from_here(target))
    elif not sys.flags.safe_path:
        script = "" if target == STANDARD_INPUT else str(Path(target).resolve().parent)
        sys.path.insert(0, here if module else script)


def _from_here(target: str) -> str:
    """Return an absolute path as the interpreter makes it, which drops no ``./``."""
    return target if Path(target).is_absolute() else f"{Path.cwd()}{os.sep}{target}"


def _code(target: str, main: types.ModuleType) -> types.CodeType:
    """Return the code of a file or of standard input, and give ``main`` its attributes."""
    if target == STANDARD_INPUT:
        main.__dict__.update(
            __file__=STDIN_FILE, __loader__=importlib.machinery.BuiltinImporter, __cached__=None
        )
        return compile(sys.stdin.buffer.read(), STDIN_FILE, "exec", dont_inherit=True)
    path = _from_here(target)
    content = Path(path).read_bytes()
    loader: Loader
    if path.endswith(".pyc") or content.startswith(importlib.util.MAGIC_NUMBER):
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = cast("types.CodeType", loader.get_code("__main__"))
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        code = compile(content, path, "exec", dont_inherit=True)
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    return code


def _depth(calls: int = 0) -> int:
    """Return how often this function can call itself, less the recursion limit."""
    try:
        return _depth(calls + 1)
    except RecursionError:
        return calls - sys.getrecursionlimit()


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
        stack_below = raised.__traceback__ and raised.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(raised), raised, stack_below))
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


R = TypeVar("R", bound=BaseException)


class ScriptNotFoundError(ValueError):
    """The script or module to watch does not exist."""


class NoTrainingError(ValueError):
    """The script ended, with ``exit_code``, before what a command needs of a training run."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def check(target: str, *, module: bool) -> None:
    """Check that ``target`` can be started, before anything is written."""
    if module:
        _check_module(target)
        return
    if target == STANDARD_INPUT:
        if sys.stdin is None or sys.stdin.isatty():
            raise ScriptNotFoundError(
                f"{target}: standard input is no file or pipe; expected a program in it"
            )
        return
    path = Path(target)
    if not path.exists():
        raise ScriptNotFoundError(f"{target}: no such script; expected a Python file below {Path.cwd()}")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise ScriptNotFoundError(f"{target}: a directory without __main__.py; expected a Python file")


def _check_module(name: str) -> None:
    """Look a module up as ``python -m`` does: in the working directory first."""
    if name.endswith(".py") and Path(name).is_file():
        raise ScriptNotFoundError(f"-m {name}: is a file, expected the name of a module; leave out -m")
    leave_own_path(name, module=True)
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            return  # missing in a package of the user's: running it shows where
        spec = None
    except ValueError:  # not a name of a module
        spec = None
    except Exception:  # noqa: BLE001 - of a package of the user's: running it shows where
        return
    if spec is None:
        raise ScriptNotFoundError(f"no module named {name!r} in {Path.cwd()} or on the path")


class Refused(BaseException):
    """What a watch refuses while the script runs; ``error`` is the reason, and no error of the script's."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def launch(
    watch: AbstractContextManager[object],
    target: str,
    arguments: list[str],
    *,
    module: bool,
    after: Callable[[], None] = lambda: None,
) -> int:
    """Run ``target`` under ``watch``, or another context, and return its exit code.

    ``after`` is called when the script has ended and ``watch`` is closed. An uncaught exception is printed as
    Python prints it, without frames of backlight. What ``watch`` refuses when it is entered is no error of
    the script's, which has not begun: it is raised as it is, and so is what it refuses later as
    :class:`Refused`.

    Raises
    ------
    Interrupted
        If a KeyboardInterrupt ended the script, or the work after it.
    """
    sys.argv = [target, *arguments]
    code, is_hurried = 0, False
    interrupt: KeyboardInterrupt | None = None
    uncaught: BaseException | None = None
    ending, entered = ExitStack(), ExitStack()

    def note(_kind: object, error: BaseException | None, _stack: object) -> None:
        nonlocal interrupt
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, SystemExit):
            interrupt = error
            ending.enter_context(copy_ignored())

    entered.enter_context(watch)
    entered.push(note)
    try:
        with ending:
            try:
                with entered:
                    run_as_main(target, module=module)
                forget_file()
            except Refused as refusal:
                raise refusal.error from None
            except SystemExit as leaving:
                code = _exit_code(leaving)
            except KeyboardInterrupt as error:
                is_hurried = error is not interrupt
                interrupt = interrupt or error
            except BaseException as error:  # noqa: BLE001 - as the interpreter does for a script
                code, uncaught = 1, _of_script(error)
            if uncaught is not None:  # not above: a hook of the script finds no exception in progress
                show(uncaught)
                uncaught = None  # as below
            if not is_hurried:  # by a second Ctrl-C, after which nothing more is waited for
                after()
    except KeyboardInterrupt as error:
        interrupt = interrupt or error
    if interrupt is not None:
        try:
            raise Interrupted(_of_script(interrupt))
        finally:
            interrupt = None  # frames of the script refer to this one: a cycle would keep their files open
    return code


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    # As the interpreter does: what a full device refuses stays in the buffer, and changes the exit code.
    if sys.stderr is not None:
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{leaving.code}\n")
    return 1


def _of_script(error: R) -> R:
    """Return an exception without the frames around the script; one that was raised there has none left."""
    stack = error.__traceback__
    while stack is not None and stack.tb_frame.f_code is not run_as_main.__code__:
        stack = stack.tb_next
    while stack is not None and (
        (file := stack.tb_frame.f_code.co_filename) == __file__ or file.startswith("<frozen importlib")
    ):
        stack = stack.tb_next
    return error.with_traceback(stack)
