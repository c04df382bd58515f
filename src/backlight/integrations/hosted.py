"""A watch that lives inside a framework: its hooks begin and end it, and none of it can end a training run.

What a framework's own file adds is where the models, the optimizers, the step and the metrics are found.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from backlight.distributed import launch_id, rank_and_size
from backlight.findings.evaluate import Findings, findings_of
from backlight.generators import kept_random
from backlight.interrupts import is_interrupt, suppressed
from backlight.monitor import Samples, check_monitors
from backlight.notebook import notebook_shell
from backlight.notifier import Notifier
from backlight.records import Finding
from backlight.session.script_end import failure, uncaught_exception
from backlight.session.settings import Settings, given_settings, suggest_keywords
from backlight.session.watch import Watch, watch
from backlight.store.errors import StoreError
from backlight.store.read.run import Run, open_run
from backlight.store.write.attempt import default_path, wait_for_ranks
from backlight.terminal import make_console, write

if TYPE_CHECKING:
    import torch
    from torch import nn


OLDEST_RELEASES = {
    "lightning": "2.4",
    "pytorch-lightning": "2.4",
    "transformers": "4.50",
    "accelerate": "1.2",
    "torchtitan": "0.3",
    "ray": "2.60",
    "deepspeed": "0.19.8",
}
"""Oldest release that each integration takes, by distribution; pyproject.toml states the same."""

OTHER_RANKS_TIMEOUT_S = 10.0
"""Seconds that rank 0 waits, at most, for the other ranks to close, before it says what was found."""

OnEnd = Callable[[list[Finding]], Any]
"""Called with the findings when a run has ended, on rank 0."""


class FrameworkError(ImportError):
    """A framework that an integration is for is missing, or too old for it."""


def require(distribution: str, extra: str) -> str:
    """Return the installed version of ``distribution``, which is recent enough."""
    least = OLDEST_RELEASES[distribution]
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if _numbers(version) < _numbers(least):
        names = {
            "lightning": "lightning",
            "huggingface": "huggingface",
            "accelerate": "huggingface",
            "ray": "ray",
            "deepspeed": "deepspeed",
        }
        source = f"'backlight[{names[extra]}]'" if extra in names else extra
        raise FrameworkError(
            f"backlight.integrations.{extra}: expected {distribution} {least} or newer, "
            f"{f'got {version}' if version else 'it is not installed'}; run: pip install --upgrade {source}"
        )
    return version


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``2.10.0.dev3`` is ``(2, 10, 0)``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


class Hosted:
    """The watch behind the callback of a framework, which the user calls ``host``.

    ``watch`` is the one that runs, else the one of the last training run; None before the first. ``begun`` is
    whether a training run has begun, watched or not.
    """

    def __init__(
        self,
        host: str,
        run: str | os.PathLike[str] | None,
        settings: Mapping[str, Any],
        *,
        samples: Samples | None = None,
        on_end: OnEnd | None = None,
        summary: bool = True,
    ) -> None:
        # A mistake in the script is refused at its line, not in the training run.
        self._settings = given_settings(settings)
        check_monitors(Settings.of(self._settings).monitors)
        self._host = host
        self._run = None if run is None else Path(run)
        self._samples = samples
        self._on_end = on_end
        self._summary = summary and not settings.get("quiet")
        self.active = self.begun = False
        self._broken: set[str] = set()
        self._notifier = Notifier(self._run or Path("runs"))
        self.watch: Watch | None = None

    def begin(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        name: str,
        step: int = 0,
    ) -> None:
        """Start to watch; ``step`` is the number of steps done before."""
        self.begun = True
        if self.active:
            self.end(RuntimeError("the training run was left, and another one started"))
        with self.shield("begin", "anything of this training run"):
            self._broken.discard("log")
            settings = {"step_offset": step, **self._settings}
            # After its first step the framework goes on with its run.
            settings["resume"] = step > 0 or settings.get("resume", False)
            path = self._run
            if path is None and self.watch is not None and step:
                path = self.watch.path
            if path is None:
                path = default_path(name, launch_id() if rank_and_size()[1] > 1 else None)
            models, optimizers = list(models), list(optimizers)
            begun = watch(models, optimizers, run=path, samples=self._samples, summary=False, **settings)
            begun.__enter__()
            self.watch, self.active = begun, True
            self._notifier = begun.notifier
            _close_at_exit(self)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Record what the framework logs: of ``values`` whatever is one number."""
        if not self.active or self.watch is None or "log" in self._broken:
            return
        with self.shield("log", "what the framework logs"):
            numbers = {n: v for n, v in values.items() if n not in {"step", "self"} and _is_number(v)}
            if numbers:
                self.watch.log(numbers, step=step)

    def end(self, error: BaseException | None = None) -> None:
        """Close the run, and report the findings once."""
        if not self.active or self.watch is None:
            return
        self.active = False
        with self.shield("end", "the end of the training run"):
            traceback = None if error is None else error.__traceback__
            self.watch.__exit__(None if error is None else type(error), error, traceback)
        if rank_and_size()[0] == 0 and self.watch.is_recorded:
            with self.shield("end", "nothing, but its findings are not printed"):
                self._say()

    @contextlib.contextmanager
    def shield(self, hook: str, lost: str) -> Iterator[None]:
        """Turn an exception into one warning that names the hook; ``lost`` is what is missing by it."""
        try:
            yield
        except Exception as error:
            if is_interrupt(error):
                raise
            self._broken.add(hook)
            reason = f"{type(error).__name__}: {error}"
            self._notifier.warn(
                f"{hook} {lost}", f"{self._host}.{hook}: not recorded: {lost}, after {reason}"
            )
            with suppressed():
                self._notifier.unmeasured(lost, f"{self._host}.{hook}: {reason}")

    def _say(self) -> None:
        if self.watch is None:
            return
        path = self.watch.path
        if rank_and_size()[1] > 1:
            wait_for_ranks(path, OTHER_RANKS_TIMEOUT_S)
        try:
            run = open_run(path)
            findings = findings_of(run)
        except StoreError as error:
            write(f"backlight: {error}", file=sys.stderr)
            return
        if self._summary and notebook_shell() is None:  # its cell shows them
            _print_summary(run, findings)
        if self._on_end is not None:
            name = getattr(self._on_end, "__qualname__", type(self._on_end).__name__)
            with self.shield("on_end", f"what {name} would have done"):
                self._on_end(findings)


def _print_summary(run: Run, findings: Findings) -> None:
    with kept_random():
        from backlight.report.terminal import print_findings  # noqa: PLC0415 - imports rich

        console = make_console(stderr=True)
        print_findings(run, findings, console)
        console.print(f"next: backlight report {run.path}", soft_wrap=True)


def _is_number(value: Any) -> bool:
    if hasattr(value, "detach"):
        return bool(value.numel() == 1)
    if isinstance(value, str):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


class Hosting:
    """Properties that the objects of all frameworks share; ``_hosted`` is the watch behind them."""

    _hosted: Hosted

    @property
    def watch(self) -> Watch | None:
        """The watch of the run in progress, else of the last one; None before the first."""
        return self._hosted.watch

    @property
    def run(self) -> Path | None:
        """The run directory; None where no watch began."""
        return None if self.watch is None else self.watch.path

    @property
    def findings(self) -> list[Finding]:
        """Findings of the run so far.

        Raises
        ------
        RuntimeError
            If no training run has begun.
        """
        if not self._hosted.begun:
            raise RuntimeError(f"{type(self).__name__}.findings: no training run has begun; train first")
        return [] if self.watch is None else self.watch.findings


class HostedWatch(Hosting):
    """A watched loop, used as a context manager around it; nothing of it raises inside the loop."""

    def __init__(self, hosted: Hosted) -> None:
        self._hosted = hosted

    def __enter__(self) -> Self:
        """Attach."""
        self._attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove everything and close the run; an exception goes on its way."""
        self._detach()
        self._hosted.end(failure(error))

    def log(
        self, values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **scalars: Any
    ) -> None:
        """Record numbers of your own at the current step, on every rank."""
        self._hosted.log({**(values or {}), **scalars}, step=step)

    def _attach(self) -> None:
        """Begin to watch, and listen to what the framework logs."""
        raise NotImplementedError

    def _detach(self) -> None:
        """Undo what :meth:`_attach` changed in the framework's objects."""
        raise NotImplementedError


class HostedCallback(Hosting):
    """The constructor that the callbacks of frameworks share.

    Parameters
    ----------
    run:
        The run directory; None for ``runs/<name>-<time>``, where the framework gives the name. One that holds
        a run is refused, unless the framework resumes after a step, or ``resume=True`` is given.
    samples:
        For the monitors grokking and spectra; see :func:`backlight.watch`.
    on_end:
        Called on rank 0 with the list of findings when a run has ended.
    summary:
        Print the findings once at the end, on rank 0.
    **settings:
        What is measured and kept, as ``monitors``, ``every``, ``steps``, ``groups``: the fields of
        :class:`backlight.session.settings.Settings`.

    Raises
    ------
    ValueError
        If a setting is out of range.
    """

    @suggest_keywords
    def __init__(
        self,
        run: str | os.PathLike[str] | None = None,
        *,
        samples: Samples | None = None,
        on_end: OnEnd | None = None,
        summary: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._hosted = Hosted(
            type(self).__name__,
            run,
            given_settings(settings),
            samples=samples,
            on_end=on_end,
            summary=summary,
        )
        self._prepare()

    def _prepare(self) -> None:
        """Create what the callback of a framework needs."""


def _close_at_exit(hosted: Hosted) -> None:
    """Close a run that the framework left without an event."""
    reference = weakref.ref(hosted)

    def close() -> None:
        left = reference()
        if left is not None and left.active:
            left.end(uncaught_exception())

    atexit.register(close)
