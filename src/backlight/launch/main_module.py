"""A script as the main module of this process: what it finds there is what ``python`` would have left."""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Iterator
from importlib.abc import Loader
from pathlib import Path
from typing import cast

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
        # And this frame, where the interpreter calls runpy itself.
        with _raised_limit(PLAIN_DEPTH - _depth() + 1):
            RUN_MODULE(target if module else "__main__", module)
    elif module or is_container:
        name = target if module else "__main__"
        runpy.run_module(name, {"__builtins__": builtins}, "__main__", alter_sys=True)
    else:
        code, measured = _code(target, main), {"depth": _depth}
        exec("found = depth()", measured)
        with _raised_limit(PLAIN_DEPTH - cast("int", measured["found"])):
            exec(code, main.__dict__)


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
    own = {str(Path(word).resolve().parent) for word in sys.orig_argv[1:2]} | {here, ""}
    if not sys.flags.safe_path and sys.path[:1] and sys.path[0] in own:
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
