"""The watch of a script that ``backlight run`` starts: attached once the script has imported torch.

Until then the process holds no module that reads what the script may still set, such as ``OMP_NUM_THREADS``,
or that draws from a generator. A script that never imports torch leaves no run.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from backlight import clock
from backlight.launch.import_hook import ImportHook
from backlight.launch.script import Refused

POLL_S = 0.05
"""Seconds between two looks at a thread that still trains when the script has ended."""

if TYPE_CHECKING:
    from backlight.session.settings import Settings
    from backlight.session.watch import Watch


class ScriptWatch:
    """Context manager around a script; ``watch`` is None until the script has imported torch.

    What the watch refuses then ends the script as :class:`Refused`.
    """

    def __init__(
        self, settings: Settings, run: Path | None, *, script: str, arguments: tuple[str, ...]
    ) -> None:
        self.watch: Watch | None = None
        self._settings, self._run = settings, run
        self._script, self._arguments = script, arguments
        self._folder = Path.cwd()
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
        """Close the run; an exception passes through."""
        self._hook.remove()
        if self.watch is None:
            return
        try:
            # Python waits for it as well, before the process ends.
            while error is None and self._trains_on():
                clock.sleep(POLL_S)
        except BaseException as interrupt:
            self.watch.__exit__(type(interrupt), interrupt, interrupt.__traceback__)
            raise
        self.watch.__exit__(kind, error, traceback)

    def _trains_on(self) -> bool:
        from backlight.capture.hub import HUB  # noqa: PLC0415 - imports torch

        return HUB.training.goes_on(daemons=False)

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
            watch.__enter__()
        except Exception as error:
            raise Refused(error) from error
        self.watch = watch
