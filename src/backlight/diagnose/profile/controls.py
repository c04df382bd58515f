"""Test what a profile suggests: run the script again with one change, interleaved with runs without it.

A claim is confirmed or withdrawn by the interval of the ratio of both, or undecided. A control changes what
is computed or learned; it runs in a subprocess whose results are discarded. In the run that it is compared
with, the same hooks are installed and change nothing.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils.data import dataloader

from backlight import codec
from backlight.capture.hooks import Patches
from backlight.diagnose.profile.answer import SHORT_CALL_MS
from backlight.diagnose.profile.optimizations import OFF
from backlight.distributed import world
from backlight.launch.subprocess import run_in_own_session
from backlight.monitors.steptime.model.step_comparison import interleave
from backlight.monitors.steptime.model.step_times import paired_difference
from backlight.trace.step_limits import LIMITS

if TYPE_CHECKING:
    from backlight.diagnose.profile.run import Profile, ProfileOptions

CACHED_BATCH = "cached batch"
ONE_THREAD = "one thread"
NO_CLIPPING = "no clipping"
FUSED_OPTIMIZER = "fused optimizer"
WITHOUT_LINE = "without the copy"

VARIABLE = "BACKLIGHT_CONTROL"
"""Environment variable that passes the control to a run of ``profile``, as JSON."""

CONFIDENCE = 0.95
"""Of the interval of a control; only a few pairs of runs are affordable."""

MIN_EFFECT = 0.05
"""Share of a step that is sought where the most that a control can save is not known."""

_LINE = re.compile(r"^(?P<line>.+:\d+) \(")
_COPIES = frozenset({
    "clone", "contiguous", "to", "float", "double", "half", "bfloat16", "type", "type_as", "to_dense",
})  # fmt: skip


@dataclass(frozen=True)
class Suspicion:
    """A possible cost: the control that would refute it, and the most that it can save of a step."""

    name: str
    claim: str
    expected: float | None
    line: str = ""


@dataclass(frozen=True, kw_only=True)
class ControlResult(Suspicion):
    """The outcome of a control.

    ``ratio`` is the step with the control to the step without, with its interval; all None where it could
    not be run. ``outcome`` is ``confirmed`` where the interval lies below 1, ``undecided`` where it holds
    both 1 and the expected effect, else ``withdrawn``; empty where there is none. ``text`` has it in words.
    """

    text: str
    pairs: int
    confidence: float = CONFIDENCE
    outcome: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


class ControlRunError(ValueError):
    """A run with or without a control failed."""


def find_suspicions(profile: Profile) -> list[Suspicion]:
    """Return what a profile suggests and a control can refute."""
    share = {name: phase.share for name, phase in profile.result.phases.items()}
    state = {row.name: row.state for row in profile.result.optimizations}
    suspicions = []
    if share.get("data", 0) > LIMITS.data:
        claim = f"waiting for data takes {share['data']:.0%} of a step"
        suspicions.append(Suspicion(CACHED_BATCH, claim, share["data"]))
    if share.get("clip", 0) > LIMITS.clip:
        claim = f"clipping takes {share['clip']:.0%} of a step"
        suspicions.append(Suspicion(NO_CLIPPING, claim, share["clip"]))
    if share.get("optimizer", 0) > LIMITS.optimizer and state.get("fused optimizer") == OFF:
        claim = f"the optimizer loops over parameters and takes {share['optimizer']:.0%} of a step"
        suspicions.append(Suspicion(FUSED_OPTIMIZER, claim, share["optimizer"]))
    live = profile.observed.live
    if live is not None and live.threads > 1 and (live.threads > live.cores or _has_short_calls(profile)):
        why = "more than there are cores" if live.threads > live.cores else "for operations that are short"
        suspicions.append(Suspicion(ONE_THREAD, f"{live.threads} threads compute, {why}", None))
    by_line: dict[str, float] = {}
    for row in profile.operations.copies if profile.operations is not None else ():
        matched = _LINE.match(row.line)
        if matched:
            by_line[matched["line"]] = by_line.get(matched["line"], 0.0) + row.share
    suspicions += [
        Suspicion(WITHOUT_LINE, f"copies of {Path(line).name} take {spent:.0%} of a traced step", spent, line)
        for line, spent in sorted(by_line.items(), key=lambda entry: -entry[1])
        if spent > LIMITS.copy
    ]
    return suspicions


def _has_short_calls(profile: Profile) -> bool:
    rows = [row for row in profile.operations.operators if row.calls] if profile.operations else []
    calls = sum(row.calls for row in rows)
    return bool(calls) and sum(row.host_ms for row in rows) / calls < SHORT_CALL_MS


def run_controls(
    profile: Profile,
    options: ProfileOptions,
    *,
    module: bool,
    pairs: int,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> tuple[ControlResult, ...]:
    """Run the controls of what a profile suggests, each in ``pairs`` of runs with and without it."""
    if pairs < 3:
        raise ValueError(f"--pairs {pairs}: expected 3 or more, an interval takes as many")
    if world().size > 1:
        raise ValueError("--confirm: controls are run by one process; profile several ranks without it")
    suspicions = find_suspicions(profile)
    results = []
    for number, suspicion in enumerate(suspicions):

        def measure(side: int, _pair: int, suspicion: Suspicion = suspicion) -> float:
            return _run(profile, options, suspicion, module=module, on=bool(side))

        def on_run(done: int, each: int, number: int = number) -> None:
            progress(number * each + done, each * len(suspicions))

        try:
            results.append(_evaluate(suspicion, *interleave(measure, pairs, on_run), pairs))
        except ControlRunError as error:
            results.append(
                ControlResult(**vars(suspicion), pairs=pairs, text=f"not tested: {suspicion.claim}; {error}")
            )
    return tuple(results)


def _run(profile: Profile, options: ProfileOptions, suspicion: Suspicion, *, module: bool, on: bool) -> float:
    """Return the median step of one run in milliseconds."""
    command = [sys.executable, "-m", "backlight", "profile", "--json", "--traced", "0"]
    command += ["--timed", str(options.steps), *(["-m"] if module else []), profile.result.script]
    control = codec.encode({"name": suspicion.name, "line": suspicion.line, "on": on})
    done = run_in_own_session(
        [*command, *profile.result.arguments], limit=None, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        environment={**os.environ, VARIABLE: control},
    )  # fmt: skip
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    try:
        answer = codec.decode(done.stdout)
        code, step = int(answer["exit_code"]), answer["step"]
    except (ValueError, KeyError):
        trouble = last or f"exit code {done.returncode}"
    else:
        if not code and step is not None:
            return float(step["median_ms"])
        trouble = "no steady step was found"
        if code:
            trouble = f"the script failed with exit code {code}: {last or 'it printed nothing'}"
    raise ControlRunError(f"{'with' if on else 'without'} the control: {trouble}")


def _evaluate(
    suspicion: Suspicion, without: list[float], with_control: list[float], pairs: int
) -> ControlResult:
    change = paired_difference(without, with_control, CONFIDENCE)
    bounds = f"{change.ratio:.2f} of the time ({change.low:.2f} to {change.high:.2f}, {pairs} pairs of runs)"
    effect = 1 - (suspicion.expected or MIN_EFFECT)
    if change.high < 1:
        outcome = "confirmed"
        saved = f"{1 - change.ratio:.0%} of a step, {1 - change.high:.0%} to {1 - change.low:.0%}"
        text = (
            f"confirmed: {suspicion.claim}; with the control ({suspicion.name}) a step takes {bounds}: "
            f"it costs {saved}"
        )
    else:
        outcome = "undecided" if change.low <= effect else "withdrawn"
        text = f"{outcome}: {suspicion.claim}, but with the control ({suspicion.name}) a step takes {bounds}"
        if outcome == "undecided":
            text += f"; 1 and {effect:.2f} are both possible: raise --pairs or --timed"
    return ControlResult(
        **vars(suspicion), pairs=pairs, text=text, outcome=outcome,
        ratio=change.ratio, low=change.low, high=change.high,
    )  # fmt: skip


def control_from_environment() -> Control | None:
    """Return the control that this process has to apply, None for none."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    described = codec.decode(text)
    return Control(described["name"], described.get("line", ""), on=bool(described["on"]))


class Control(AbstractContextManager["Control"]):
    """Applies one control to the script that runs inside it.

    ``line`` is file and line of the copy to omit, as ``path:number``, for :data:`WITHOUT_LINE`. With
    ``on=False`` the hooks are installed and change nothing.
    """

    def __init__(self, name: str, line: str = "", *, on: bool = True) -> None:
        self._on = on
        self._line = line
        self._patches = Patches()
        self._mode: _OmitCopy | None = None
        starts = {
            CACHED_BATCH: self._cache_batches,
            ONE_THREAD: self._use_one_thread,
            NO_CLIPPING: self._omit_clipping,
            FUSED_OPTIMIZER: self._fuse_optimizers,
            WITHOUT_LINE: self._omit_copy,
        }
        if name not in starts:
            raise ValueError(f"no control is called {name!r}; expected one of: {', '.join(starts)}")
        self._start = starts[name]

    def __enter__(self) -> Control:
        """Apply."""
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Undo."""
        self._patches.undo()
        if self._mode is not None:
            self._mode.on = False

    def _cache_batches(self) -> None:
        """Repeat the first batch of each data set, as many times as the loader has batches."""
        kept: dict[int, Any] = {}
        yielded: dict[int, int] = {}

        def wrap(original: Any) -> Any:
            @functools.wraps(original)
            def __next__(iterator: Any) -> Any:  # noqa: N807
                source = id(getattr(iterator, "_dataset", None))
                if not self._on or source not in kept:
                    kept[source] = item = original(iterator)
                    return item
                yielded[id(iterator)] = yielded.get(id(iterator), 0) + 1
                try:
                    length = len(iterator)
                except TypeError:
                    length = sys.maxsize  # an iterable data set has no length
                if yielded[id(iterator)] > length:
                    del yielded[id(iterator)]
                    raise StopIteration
                return kept[source]

            return __next__

        self._patches.replace(dataloader._BaseDataLoaderIter, "__next__", wrap)

    def _use_one_thread(self) -> None:
        if self._on:
            torch.set_num_threads(1)
            self._patches.replace(torch, "set_num_threads", lambda _original: lambda _count: None)

    def _omit_clipping(self) -> None:
        if not self._on:
            return
        zero = torch.zeros(())
        self._patches.replace(clip_grad, "_get_total_norm", lambda _original: lambda *_args, **_more: zero)
        self._patches.replace(
            clip_grad, "_clip_grads_with_norm_", lambda _original: lambda *_args, **_more: None
        )

    def _fuse_optimizers(self) -> None:
        def wrap(original: Any) -> Any:
            @functools.wraps(original)
            def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
                if not self._on:
                    original(optimizer, *args, **kwargs)
                    return
                try:
                    original(optimizer, *args, **{**kwargs, "fused": True, "foreach": None})
                except RuntimeError:  # not for these types or this device
                    original(optimizer, *args, **kwargs)

            return __init__

        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
            if "__init__" in vars(kind):
                self._patches.replace(kind, "__init__", wrap)

    def _omit_copy(self) -> None:
        self._mode = _OmitCopy(self._line, on=self._on)
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # as torch has it


class _OmitCopy(TorchFunctionMode):
    """Returns the source of a copy on one line in place of the copy."""

    def __init__(self, line: str, *, on: bool) -> None:
        super().__init__()
        self._file, _, number = line.rpartition(":")
        self._number = int(number)
        self.on = on

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and getattr(func, "__name__", "") in _COPIES:
            frame = sys._getframe(1)
            is_here = frame.f_lineno == self._number and frame.f_code.co_filename == self._file
            if is_here and self.on:
                return args[0]
        return func(*args, **(kwargs or {}))
