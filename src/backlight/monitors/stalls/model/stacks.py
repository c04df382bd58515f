"""Python stacks as data, from whatever took them, and what can be read off them. No torch."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from backlight.records import Phase


@dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """File and line as they are shown: ``ops.py:22``."""
        return f"{PurePath(self.file).name}:{self.line}"

    @property
    def method(self) -> str:
        """Function with its class where the name holds it: ``LockedFn.backward``."""
        return ".".join(p for p in self.function.split(".") if p != "<locals>")


@dataclass(frozen=True)
class ThreadStack:
    """The stack of one thread, innermost frame first.

    ``turn``: the innermost frame runs byte code, not a call; None where not known. ``native`` are frames
    of C code above the Python ones, where they were taken; ``holds_gil`` is None where it was not sampled.
    """

    ident: int
    frames: tuple[Frame, ...]
    name: str = ""
    tid: int | None = None
    runs_bytecode: bool | None = None
    native: tuple[str, ...] = ()
    holds_gil: bool | None = None


@dataclass(frozen=True)
class StackSample:
    """All stacks of a process at one moment (monotonic nanoseconds), and who took them."""

    at: int
    source: str
    threads: tuple[ThreadStack, ...]

    def thread(self, ident: int) -> ThreadStack | None:
        """Return the stack of a thread by its Python ident."""
        return next((t for t in self.threads if t.ident == ident), None)


def parse_sampler_stacks(data: Any) -> tuple[StackSample, ...]:
    """Read the looks that the helper thread keeps; what is not understood is left out."""
    samples = []
    for item in data if isinstance(data, list) else ():
        try:
            threads = tuple(
                ThreadStack(
                    int(t["ident"]),
                    tuple(Frame(str(f), int(line), str(name)) for f, line, name in t["frames"]),
                    str(t["name"]),
                    t["tid"],
                    t["runs_bytecode"],
                )
                for t in item["threads"]
            )
            samples.append(StackSample(int(item["at"]), str(item["source"]), threads))
        except (KeyError, TypeError, ValueError):
            continue
    return tuple(samples)


_THREAD = re.compile(
    r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[([^\]]*)\])? \(most recent call first\):"
)
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def parse_faulthandler(text: str, at: int) -> StackSample:
    """Read a dump of all threads by the C handler of Python."""
    found: list[tuple[int, str, list[Frame]]] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            found.append((int(match[1], 16), match[2] or "", []))
        elif (match := _FRAME.match(line)) and found:
            number = int(match[2]) if match[2].isdecimal() else 0
            found[-1][2].append(Frame(match[1], number, match[3]))
    threads = tuple(ThreadStack(ident, tuple(frames), name) for ident, name, frames in found)
    return StackSample(at, "faulthandler", threads)


def parse_py_spy(data: Iterable[Mapping[str, Any]], at: int) -> StackSample:
    """Read ``py-spy dump --json``; frames of C code stand before the Python frame that called them."""
    threads = []
    for item in data:
        python, native = [], []
        for frame in item.get("frames", ()):
            file = str(frame.get("filename") or "")
            name = str(frame.get("name") or "")
            if file.endswith(".py") or file.startswith("<"):
                python.append(Frame(file, int(frame.get("line") or 0), name))
            elif not python:
                native.append(name)
        threads.append(
            ThreadStack(
                int(item.get("thread_id") or 0),
                tuple(python),
                str(item.get("thread_name") or ""),
                item.get("os_thread_id"),
                None,
                tuple(native),
                item.get("owns_gil"),
            )
        )
    return StackSample(at, "py-spy", tuple(threads))


_ENGINE = "_engine_run_backward"
_OWN = str(Path(__file__).resolve().parents[1]).replace("\\", "/") + "/"
_LAUNCHER = "/backlight/session/launcher.py"
_LIBRARIES = (
    "/torch/",
    "/site-packages/",
    "/dist-packages/",
    "<frozen",
    "/backlight/capture/",
    "/backlight/session/",
)


@cache
def is_library(file: str) -> bool:
    """Tell whether a file belongs to a library rather than to the user."""
    path = file.replace("\\", "/")
    standard = sysconfig.get_paths()["stdlib"].replace("\\", "/")
    if path.startswith((_OWN, standard)) or "/lib/python3" in path:
        return True
    return any(part in path for part in _LIBRARIES)


def in_engine(stack: ThreadStack) -> bool:
    """Tell whether a thread is inside the autograd engine, at any depth."""
    return any(f.function.endswith(_ENGINE) for f in stack.frames)


def in_native_backward(stack: ThreadStack) -> bool:
    """Tell whether the innermost Python frame is the engine's: what runs is native."""
    return bool(stack.frames) and stack.frames[0].function.endswith(_ENGINE)


def find_working_thread(sample: StackSample, ident: int) -> ThreadStack | None:
    """Return the thread that does the work of the training.

    That is the one with ``ident``, unless it waits in the engine while another thread, of the engine,
    runs Python: nested backwards beyond some depth, and backwards of other devices, have their own.
    """
    main = sample.thread(ident)
    if main is None or not in_native_backward(main):
        return main
    for thread in sample.threads:
        if thread.ident != ident and thread.frames and _entered_by_engine(thread.frames[-1]):
            return thread
    return main


def _entered_by_engine(outermost: Frame) -> bool:
    file = outermost.file.replace("\\", "/")
    return (
        "torch/autograd/" in file
        or "backlight/monitors/stalls/instrument/heartbeat.py" in file
        or "torch/utils/checkpoint" in file
    )


def place(stack: ThreadStack) -> Frame | None:
    """Return the innermost frame of the user's own code, or of anybody's where there is none."""
    own = [f for f in stack.frames if not is_library(f.file) and "/backlight/stalls/" not in f.file]
    if own:
        return own[0]
    rest = [f for f in stack.frames if "/backlight/" not in f.file]
    return rest[0] if rest else None


_COMPILING = (
    "torch/_dynamo/convert_frame.py",
    "torch/_dynamo/symbolic_convert.py",
    "torch/fx/experimental/proxy_tensor.py",
    "torch/_subclasses/fake_tensor.py",
    "torch/_inductor/graph.py",
    "torch/_inductor/fx_passes/",
    "torch/_inductor/pattern_matcher.py",
    "torch/_inductor/lowering.py",
    "torch/_inductor/ir.py",
    "torch/_inductor/codegen/",
    "torch/_inductor/scheduler.py",
    "torch/_inductor/async_compile.py",
    "torch/_inductor/codecache.py",
    "torch/utils/cpp_extension.py",
    "triton/compiler/compiler.py",
)
_COMPILERS = ("torch/_dynamo/", "torch/_inductor/", "torch/_functorch/")
_SAVING = ("torch/distributed/checkpoint/", "safetensors/", "torch/serialization.py")
_LOADING = ("torch/utils/data/dataloader.py",)
_COLLECTING = ("torch/distributed/distributed_c10d.py",)
_FUNCTIONAL = ("torch/distributed/_functional_collectives.py",)
_REDUCER = ("torch/nn/parallel/distributed.py",)


def is_compiling(stack: ThreadStack) -> bool:
    """Tell whether a thread is inside a compiler of torch, or loads it, which may take minutes."""
    loads = _has(stack.frames, ("<frozen importlib",)) and _has(stack.frames, _COMPILERS)
    # The same file holds what runs compiled code: its functions tell.
    inside = any("torch/_inductor/compile_fx.py" in f.file and "compile" in f.function for f in stack.frames)
    return loads or inside or _has(stack.frames, _COMPILING)


def in_collective(stack: ThreadStack) -> bool:
    """Tell whether the innermost frames are those of a collective call.

    The wrapper of DDP calls the model as well: only where it is innermost does it wait for others.
    """
    return (
        _has(stack.frames[:4], _COLLECTING)
        # Of tensor parallelism: an operator of torch, in Python, stands between this and the wait.
        or _has(stack.frames[:8], _FUNCTIONAL)
        or _has(stack.frames[:1], _REDUCER)
    )


def phase_of(stack: ThreadStack) -> Phase | None:
    """Return the phase that a stack shows for itself, None where it does not."""
    if in_engine(stack):
        return Phase.BACKWARD
    if _has(stack.frames, _SAVING):
        return Phase.CHECKPOINT
    if _has(stack.frames, _LOADING):
        return Phase.DATA
    if _has(stack.frames, ("torch/optim/",)):
        return Phase.OPTIMIZER
    if _has(stack.frames, ("torch/nn/utils/clip_grad.py",)):
        return Phase.CLIP
    if _has(stack.frames, ("torch/nn/modules/",)):
        return Phase.FORWARD
    return None


def _has(frames: Iterable[Frame], parts: tuple[str, ...]) -> bool:
    return any(part in f.file.replace("\\", "/") for f in frames for part in parts)


def strip_launcher(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames of a script alone: not those that started it, nor those of our own wrappers."""
    for place, frame in enumerate(frames):
        if frame.file.replace("\\", "/").endswith(_LAUNCHER):
            frames = frames[:place]
            break
    return tuple(f for f in frames if not f.file.replace("\\", "/").startswith(_OWN))


def format_sample(sample: StackSample) -> str:
    """Return a look in the form in which it is kept as evidence: the user's line first, then the stack."""
    lines = [f"taken by {sample.source}"]
    for thread in sample.threads:
        frames = strip_launcher(thread.frames)
        lines.append(f"\nThread {thread.ident:#x} {thread.name} (most recent call first)")
        where = next((f for f in frames if not is_library(f.file)), None)
        if where is not None:
            lines.append(f"  at {where.place} in {where.method}")
        lines += [f"  [native] {name}" for name in thread.native]
        lines += [f'  File "{f.file}", line {f.line} in {f.function}' for f in frames]
        if len(frames) < len(thread.frames):
            lines.append(f"  ({len(thread.frames) - len(frames)} frames of backlight itself are left out)")
    return "\n".join(lines) + "\n"
