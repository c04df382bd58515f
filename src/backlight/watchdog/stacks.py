"""Stacks of processes: dump and parse them, and read phase and user code off them. No torch.

Sources in rising order of intrusion: the sampler thread inside the process, py-spy from outside, faulthandler
by signal, py-spy with native frames, which stops the process for a moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from backlight import clock, processes, untrusted_files
from backlight.records import Phase
from backlight.user_code import is_third_party, is_user_code

DUMP_SIGNAL = int(signal.SIGRTMIN) + 5 if hasattr(signal, "SIGRTMIN") else 0
"""Signal at which a watched process dumps its stacks: the common user signals belong to others."""

DUMP_TIMEOUT_S = 0.6
MAX_DUMP_BYTES = 256 * 1024 * 1024
_DUMP_POLL_S = 0.02
_TGKILL = {"x86_64": 234, "aarch64": 131}
"""Number of the system call by architecture."""

NATIVE_TIMEOUT_S = 10.0
"""Time in which py-spy reads the symbols of torch, on a busy machine."""

FIRST_TRIES = 3
FIRST_TIMEOUT_S = 2.0
"""Readings before the first sample is given up, and the time of each on a busy machine."""

D_CHECKS = 5
D_PERIOD_S = 0.04
"""Number and distance of readings of a state D: most such waits are over in a moment."""

_TRACING_DENIED = (
    "tracing this process is denied here (it needs CAP_SYS_PTRACE, or the same user and ptrace_scope 0)"
)


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def location(self) -> str:
        """File name and line: ``ops.py:22``."""
        return f"{PurePath(self.file).name}:{self.line}"

    @property
    def qualified_name(self) -> str:
        """Function with its class where the name holds it: ``LockedFn.backward``."""
        return ".".join(p for p in self.function.split(".") if p != "<locals>")

    def __str__(self) -> str:
        """Return ``path:line``."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class ThreadStack:
    """The stack of one thread, innermost frame first; what the source does not report is None."""

    ident: int
    frames: tuple[Frame, ...]
    name: str = ""
    tid: int | None = None
    runs_bytecode: bool | None = None  # the innermost frame is not in a call
    native: tuple[Frame, ...] = ()  # frames of C code above the Python ones
    holds_gil: bool | None = None
    called: str = ""  # function in C that the innermost frame calls
    variables: tuple[tuple[str, str], ...] = ()  # texts in local variables of known waits


@dataclass(frozen=True)
class StackSample:
    """All stacks of a process at one moment (monotonic nanoseconds), and their source."""

    at: int
    source: str
    threads: tuple[ThreadStack, ...]

    def thread(self, ident: int) -> ThreadStack | None:
        """Return the stack of a thread by its Python ident."""
        return next((t for t in self.threads if t.ident == ident), None)


# Parsing


def parse_frames(rows: Iterable[Any]) -> tuple[Frame, ...]:
    """Return frames from JSON."""
    return tuple(Frame(str(file), int(line), str(function)) for file, line, function in rows)


def parse_samples(data: Any) -> tuple[StackSample, ...]:
    """Return the samples of the sampler thread from JSON."""
    return tuple(
        StackSample(int(s["at"]), str(s["source"]), tuple(map(_parse_thread, s["threads"]))) for s in data
    )


def _parse_thread(data: Any) -> ThreadStack:
    frames = {name: parse_frames(data[name]) for name in ("frames", "native")}
    variables = tuple((str(name), str(text)) for name, text in data.get("variables", ()))
    return ThreadStack(**{**data, **frames, "variables": variables})


_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def parse_faulthandler(text: str) -> tuple[Frame, ...]:
    """Parse the last stack that :mod:`faulthandler` wrote of one thread."""
    last = text.rpartition("(most recent call first):")[2]
    matches = filter(None, map(_FRAME.match, last.splitlines()))
    return tuple(Frame(m[1], int(m[2]) if m[2].isdecimal() else 0, m[3]) for m in matches)


def parse_py_spy(data: Iterable[Mapping[str, Any]], at: int = 0) -> StackSample:
    """Parse ``py-spy dump --json``, whose frames of C code precede the Python frame that called them."""
    threads = []
    for item in data:
        python: list[Frame] = []
        native: list[Frame] = []
        for entry in item.get("frames", ()):
            file = str(entry.get("filename") or "")
            frame = Frame(file, int(entry.get("line") or 0), str(entry.get("name") or ""))
            if file.endswith(".py") or file.startswith("<"):
                python.append(frame)
            elif not python:
                native.append(frame)
        threads.append(
            ThreadStack(
                int(item.get("thread_id") or 0),
                tuple(python),
                str(item.get("thread_name") or ""),
                item.get("os_thread_id"),
                None,
                tuple(native),
                item.get("owns_gil"),
                variables=_texts(item.get("frames", ())),
            )
        )
    return StackSample(at, "py-spy", tuple(threads))


def _texts(frames: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Return the local variables that py-spy shows as texts."""
    texts = []
    for frame in frames:
        for variable in frame.get("locals") or ():
            shown = str(variable.get("repr") or "")
            if len(shown) > 1 and shown[0] == shown[-1] == '"':
                texts.append((str(variable.get("name")), shown[1:-1]))
    return tuple(texts)


# Dumping


def dump_by_signal(pid: int, tid: int, ident: int, dump: Path) -> tuple[StackSample | None, str]:
    """Make one thread of a watched process dump its stack into ``dump``; return it, or None and the reason.

    No thread reads the frames of another, which may free them meanwhile while it runs: that would crash the
    process. ``ident`` is Python's number of the thread, ``tid`` that of the system. A thread in a system call
    gets no signal: a sleep or a wait in C, which may not begin again, would end early.
    """
    # The signal would end a process that does not handle it.
    if not DUMP_SIGNAL or not processes.handles_signal(pid, DUMP_SIGNAL):
        return None, "the process has no handler for the signal that dumps stacks"
    if not _is_computing(pid, tid):
        return None, "a thread in a system call gets no signal, which could end the call early"
    try:
        before = dump.stat().st_size
        _signal_thread(pid, tid)
    except OSError as error:
        return None, f"the signal that dumps stacks could not be sent: {error.strerror}"
    at = clock.monotonic_ns()
    deadline = clock.monotonic() + DUMP_TIMEOUT_S
    last, size = before, before
    while clock.monotonic() < deadline:
        clock.sleep(_DUMP_POLL_S)
        size = dump.stat().st_size
        if size > before and size == last:
            break
        last = size
    if size == before:
        return None, "the thread does not handle the signal that dumps stacks"
    try:
        opened = untrusted_files.open_descriptor(dump, MAX_DUMP_BYTES, owners={os.geteuid()})
        with os.fdopen(opened, "rb") as file:
            file.seek(before)
            text = file.read(MAX_DUMP_BYTES).decode("utf-8", "backslashreplace")
    except OSError as error:
        return None, f"the dump by signal cannot be read: {error.strerror}"
    frames = parse_faulthandler(text)
    if not frames:
        return None, "the dump by signal holds no stack"
    return StackSample(at, "faulthandler", (ThreadStack(ident, frames, tid=tid),)), ""


def _is_computing(pid: int, tid: int) -> bool:
    """Return whether a thread is at work in code of its own: a signal then ends no system call early."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/task/{tid}/syscall").read_text(encoding="ascii").startswith("running")
    # Its state may be read where the call may not.
    return any(thread.tid == tid and thread.state == "R" for thread in processes.read_threads(pid))


def _signal_thread(pid: int, tid: int) -> None:
    """Send the signal to one thread; OSError where it cannot be sent."""
    number = _TGKILL.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"not known how on {os.uname().machine}")
    # The C library has a function for it since glibc 2.30 only.
    if ctypes.CDLL(None, use_errno=True).syscall(number, pid, tid, DUMP_SIGNAL) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def run_py_spy(pid: int, *options: str, timeout_s: float = 5.0) -> tuple[str, str]:
    """Return what ``py-spy dump --json`` prints for a process, or an empty text and the reason."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return "", "py-spy is not installed (pip install 'backlight[stalls]')"
    command = [program, "dump", "--pid", str(pid), "--json", *options]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"py-spy did not answer within {timeout_s:g} s"
    except OSError as error:
        return "", f"py-spy: {error}"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        reason = f"py-spy: {lines[0] if lines else f'exit code {done.returncode}'}"
        return "", reason if processes.is_traceable(pid) else f"{_TRACING_DENIED} ({reason})"
    return done.stdout, ""


def first_sample(pid: int) -> StackSample | None:
    """Return the Python stacks of a process as soon as they can be read, None where they cannot."""
    # Read from a running process they may be torn; the next reading is another moment.
    for _ in range(FIRST_TRIES):
        sample, _reason = dump_by_py_spy(pid, timeout_s=FIRST_TIMEOUT_S)
        if sample is not None and sample.threads:
            return sample
    return None


def dump_by_py_spy(
    pid: int, *, native: bool = False, variables: bool = False, timeout_s: float = 5.0
) -> tuple[StackSample | None, str]:
    """Dump stacks with py-spy, which pauses the process only if ``native``; return None and the reason."""
    if native and _is_uninterruptible(pid):
        return None, "py-spy: a thread is in a wait that no tracer can interrupt (state D)"
    at = clock.monotonic_ns()
    options = ["--native" if native else "--nonblocking", *(["--locals"] if variables else [])]
    text, reason = run_py_spy(pid, *options, timeout_s=timeout_s)
    if not text:
        return None, reason
    try:
        return parse_py_spy(json.loads(text), at), ""
    except (ValueError, AttributeError, TypeError) as error:
        return None, f"py-spy: unexpected output: {error}"


def _is_uninterruptible(pid: int) -> bool:
    """Return whether a thread stays in state D: py-spy would wait for it, and leave it stopped at its end."""
    for _ in range(D_CHECKS):
        if all(thread.state != "D" for thread in processes.read_threads(pid)):
            return False
        clock.sleep(D_PERIOD_S)
    return True


# Reading

_ENGINE = "_engine_run_backward"
_ENGINE_FILES = (
    "torch/autograd/", "torch/utils/checkpoint", "backlight/monitors/stalls/instrument/heartbeat.py",
)  # fmt: skip
_BACKLIGHT = str(Path(__file__).resolve().parents[1]).replace("\\", "/") + "/"
_LAUNCHER = _BACKLIGHT + "launch/"


def user_frame(stack: ThreadStack) -> Frame | None:
    """Return the user's innermost frame, else a package's outermost, else the innermost not of backlight."""
    candidates = (
        *(f for f in stack.frames if is_user_code(f.file)),
        *(f for f in reversed(stack.frames) if is_third_party(f.file)),
        *(f for f in stack.frames if not is_backlight(f.file)),
    )
    return next(iter(candidates), None)


REGION_LINE = "region.line"
"""Variable of a stack with the line at which the script called ``checkpoint``."""

_RECOMPUTATION = ("torch/utils/checkpoint.py", {"unpack_hook", "backward"})
"""File and functions of torch in which backward runs a checkpointed region again."""


@dataclass(frozen=True)
class RecomputedRegion:
    """A checkpointed region that backward runs again: its function, and the line that checkpoints it.

    Neither is known of a region of library code that was not followed.
    """

    frame: Frame | None = None
    line: str = ""


def recomputed_region(stack: ThreadStack) -> RecomputedRegion | None:
    """Return the innermost region whose recomputation a stack shows, None outside of one."""
    file, functions = _RECOMPUTATION
    for depth, frame in enumerate(stack.frames):
        if frame.file.replace("\\", "/").endswith(file) and frame.function.rpartition(".")[2] in functions:
            outermost = next((f for f in reversed(stack.frames[:depth]) if is_user_code(f.file)), None)
            return RecomputedRegion(outermost, dict(stack.variables).get(REGION_LINE, ""))
    return None


def is_backlight(file: str) -> bool:
    """Return whether a file belongs to backlight itself."""
    return file.replace("\\", "/").startswith(_BACKLIGHT)


def in_engine(stack: ThreadStack) -> bool:
    """Return whether a thread is inside the autograd engine, at any depth."""
    return any(f.function.endswith(_ENGINE) for f in stack.frames)


def in_native_backward(stack: ThreadStack) -> bool:
    """Return whether the innermost Python frame is the engine's, so that native code runs."""
    return bool(stack.frames) and stack.frames[0].function.endswith(_ENGINE)


def find_working_thread(sample: StackSample, ident: int) -> ThreadStack | None:
    """Return the thread that does the work of the step: ``ident``, unless it waits for one of the engine."""
    main = sample.thread(ident)
    if main is None or not in_native_backward(main):
        return main
    # Deeply nested backward passes, and those of other devices, have threads of their own.
    others = (t for t in sample.threads if t.ident != ident and _has(t.frames[-1:], _ENGINE_FILES))
    return next(others, main)


def native_operation(sample: StackSample) -> str | None:
    """Return the innermost autograd node among the native frames of a sample."""
    for thread in sample.threads:
        if in_engine(thread):
            for frame in thread.native:
                name = frame.function.split("(")[0]
                if name.endswith("::apply") and "Backward" in name:
                    return name.split("::")[-2]
    return None


def native_function(sample: StackSample, tid: int) -> str:
    """Return the innermost named function in C above the Python frames of a thread; empty where none is."""
    thread = next((t for t in sample.threads if t.tid == tid), None)
    names = (frame.function.split("(")[0] for frame in (thread.native if thread is not None else ()))
    return next((name for name in names if name and not name.startswith("0x")), "")


_COMPILER_FILES = (
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
    "torch/_inductor/select_algorithm.py",
    "torch/_inductor/autotune_process.py",
    "torch/_inductor/runtime/benchmarking.py",
    "torch/_inductor/runtime/compile_tasks.py",
    "torch/_inductor/runtime/coordinate_descent_tuner.py",
    "torch/_inductor/codecache.py",
    "torch/utils/cpp_extension.py",
    "triton/compiler/compiler.py",
)
_COMPILER_FUNCTIONS = (
    ("torch/_inductor/compile_fx.py", ("compile",)),
    # Its `run` launches a kernel, unless it tunes or compiles first.
    (
        "torch/_inductor/runtime/triton_heuristics.py",
        ("compile", "bench", "autotune_to", "make_launcher", "_tuning"),
    ),
)
_COMPILER_PACKAGES = ("torch/_dynamo/", "torch/_inductor/", "torch/_functorch/")


def is_compiling(stack: ThreadStack) -> bool:
    """Return whether a thread is inside a compiler of torch, or imports it, which may take minutes."""
    imports = _has(stack.frames, ("<frozen importlib",)) and _has(stack.frames, _COMPILER_PACKAGES)
    # The same file also runs compiled code: its function names decide.
    inside = any(
        part in f.file and any(word in f.function for word in words)
        for f in stack.frames
        for part, words in _COMPILER_FUNCTIONS
    )
    return imports or inside or _has(stack.frames, _COMPILER_FILES)


def in_collective(stack: ThreadStack) -> bool:
    """Return whether the innermost frames are those of a collective call."""
    return (
        _has(stack.frames[:4], ("torch/distributed/distributed_c10d.py",))
        # Tensor parallelism: a Python operator of torch lies between this file and the wait.
        or _has(stack.frames[:8], ("torch/distributed/_functional_collectives.py",))
        # DDP's wrapper calls the model as well: only where it is innermost does it wait for other ranks.
        or _has(stack.frames[:1], ("torch/nn/parallel/distributed.py",))
    )


_PHASE_FILES = (
    (Phase.CHECKPOINT, ("torch/distributed/checkpoint/", "safetensors/", "torch/serialization.py")),
    (Phase.DATA, ("torch/utils/data/dataloader.py",)),
    (Phase.OPTIMIZER, ("torch/optim/",)),
    (Phase.CLIP, ("torch/nn/utils/clip_grad.py",)),
    (Phase.FORWARD, ("torch/nn/modules/",)),
)


def phase_of(stack: ThreadStack) -> Phase | None:
    """Return the phase that a stack shows by its frames, None where it shows none."""
    if in_engine(stack):
        return Phase.BACKWARD
    return next((phase for phase, files in _PHASE_FILES if _has(stack.frames, files)), None)


def _has(frames: Iterable[Frame], parts: tuple[str, ...]) -> bool:
    return any(part in f.file.replace("\\", "/") for f in frames for part in parts)


def strip_backlight(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames of a script alone, without its launcher and the wrappers of backlight."""
    inside = itertools.takewhile(lambda f: not f.file.replace("\\", "/").startswith(_LAUNCHER), frames)
    return tuple(f for f in inside if not is_backlight(f.file))


def format_sample(sample: StackSample) -> str:
    """Return a sample as text, the form of the evidence: the user's line first, then the stack."""
    lines = [f"taken by {sample.source}"]
    for thread in sample.threads:
        frames = strip_backlight(thread.frames)
        lines.append(f"\nThread {thread.ident:#x} {thread.name} (most recent call first)")
        user = next((f for f in frames if is_user_code(f.file)), None)
        if user is not None:
            lines.append(f"  at {user.location} in {user.qualified_name}")
        lines += [f"  [native] {frame.function}" for frame in thread.native]
        lines += [f'  File "{f.file}", line {f.line} in {f.function}' for f in frames]
        if len(frames) < len(thread.frames):
            lines.append(f"  ({len(thread.frames) - len(frames)} frames of backlight itself are left out)")
    return "\n".join(lines) + "\n"


def format_threads(pid: int, limit: int = 200) -> str:
    """Return state, CPU time and wait of every thread as a table of text."""
    lines = ["tid      state  cpu_s    waits_for            name"]
    threads = processes.read_threads(pid)
    for thread in threads[:limit]:
        wait = processes.wait_reason(pid, thread.tid) if thread.state in {"S", "D"} else ""
        lines.append(
            f"{thread.tid:<8} {thread.state:<6} {thread.cpu_s:<8.2f} {wait or '-':<20} {thread.name}"
        )
    if len(threads) > limit:
        lines.append(f"and {len(threads) - limit} more")
    return "\n".join(lines) + "\n"
