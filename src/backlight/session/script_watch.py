"""The watch of a script that ``backlight run`` starts: attached once the script has imported torch.

Until then the process holds no module that reads what the script may still set, such as ``OMP_NUM_THREADS``,
or that draws from a generator. A script that never imports torch leaves no run.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from backlight import clock
from backlight.interrupts import is_interrupt
from backlight.launch.import_hook import ImportHook
from backlight.launch.script import Refused

if TYPE_CHECKING:
    from backlight.session.settings import Settings
    from backlight.session.watch import Watch


class ScriptWatch:
    """Context manager around a script; ``watch`` is None until the script has imported torch.

    What the watch refuses then ends the script as :class:`Refused`.
    """

    def __init__(
        self,
        settings: Settings,
        run: Path | None,
        *,
        script: str,
        arguments: tuple[str, ...],
        reading: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._pid = os.getpid()
        self.watch: Watch | None = None
        self._settings, self._run = settings, run
        self._script, self._arguments, self._reading = script, arguments, reading
        self._folder = Path.cwd()
        self._is_open = False
        self._hook = ImportHook("torch", self._attach)

    def __enter__(self) -> Self:
        """Wait for the import of torch.

        Raises
        ------
        ModuleNotFoundError
            If torch is not installed.
        """
        if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        self._before_s = clock.process_time()  # nothing but backlight has run
        try:
            self._hook.install()
        except Refused as refusal:  # torch is imported already: the script has not begun
            raise refusal.error from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the run, or leave that to :meth:`when_closed`; an exception passes through.

        Threads of the script that go on may train: Python waits for them before it calls what is registered
        at exit, and the run is closed then.
        """
        self._hook.remove()
        if self.watch is None:
            return
        from backlight.capture.training_threads import runs_user_code  # noqa: PLC0415 - imports torch

        self._is_open = error is None and runs_user_code(threading.enumerate())
        if not self._is_open:
            self.watch.__exit__(kind, error, traceback)

    def when_closed(self, call: Callable[[], None]) -> None:
        """Call ``call`` once the run is closed: now, or when the threads of the script have ended.

        A forked child that goes on as the script has no run, and may hold locks of threads that it lacks.
        """
        if os.getpid() != self._pid:
            return
        if self._is_open:
            atexit.register(self._close_at_exit, call, os.getpid())
        else:
            call()

    def _close_at_exit(self, call: Callable[[], None], pid: int) -> None:
        if self.watch is not None and os.getpid() == pid:
            self.watch.__exit__(None, None, None)
            call()

    def _attach(self) -> None:
        began = clock.perf_counter()
        from backlight.session.watch import Watch  # noqa: PLC0415 - imports torch

        run = self._run
        if run is not None and Path.cwd() != self._folder:  # the script has moved since
            run = self._folder / run
        try:
            watch = Watch(
                (), (), self._settings, run, script=self._script, arguments=self._arguments,
                spent_s=self._before_s + clock.perf_counter() - began,
            )  # fmt: skip
            watch.reading = self._reading
            watch.__enter__()
        except Exception as error:
            if is_interrupt(error):
                raise
            raise Refused(error) from error
        self.watch = watch
