"""Run a training script as Python would, under a context manager.

The script's exit code, output, exceptions and signals are its own; what backlight has to say goes
to standard error after it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TypeVar

from backlight.launch import main_module
from backlight.launch.main_module import STANDARD_INPUT, forget_file, leave_own_path, run_as_main
from backlight.launch.uncaught import Interrupted, copy_ignored, show

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
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            name = f"{name}.__main__"
            found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            return  # missing in a package of the user's: running it shows where
        found = None
    except ValueError:  # not a name of a module
        found = None
    except Exception:  # noqa: BLE001 - of a package of the user's: running it shows where
        return
    if found is None:
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
        (file := stack.tb_frame.f_code.co_filename) == main_module.__file__
        or file.startswith("<frozen importlib")
    ):
        stack = stack.tb_next
    return error.with_traceback(stack)
