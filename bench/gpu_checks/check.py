"""A check on a device: its options, figures with what is expected of them, and the exit code.

A file of this folder has a docstring whose first line is its subject, ``EXPECTED`` (what holds, in words; the
page ``docs/gpu.md`` lists it), and ends with ``Check.run(main, EXPECTED)``. ``--device sim`` is the simulated
accelerator of the tests, ``--small`` asks for sizes that show the logic only.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
FOLDERS = [str(ROOT / name) for name in ("src", "tests", "tests/accelerator", ".")]
sys.path[:0] = FOLDERS
# Processes that a check starts find the same.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*FOLDERS, os.environ.get("PYTHONPATH")]))

import torch  # noqa: E402 - after the folders

SKIPPED = 77
BUSY_CYCLES_PER_S = 1_500_000_000
"""Cycles that keep a CUDA device busy for about a second; what is slower is busy for longer."""


class Check:
    """One run of a check; ``folder`` is empty, and removed at its end."""

    def __init__(self, device: str, folder: Path, *, is_small: bool) -> None:
        self.kind, self.folder, self.is_small = device, folder, is_small
        self.holds = True
        self.simulated: Any = None
        if device == "sim":
            import simulated

            from backlight.measure.stats.fused_rows import LOADERS

            self.simulated, LOADERS["sim"] = simulated, simulated.load_kernels
        elif device != "cpu" and not torch.accelerator.is_available():
            self.skip(f"torch {torch.__version__} finds no {device}")
        torch.manual_seed(0)

    @staticmethod
    def run(main: Callable[[Check], None], expected: str) -> NoReturn:
        """Run a check with the options of the command line, and exit with 0, 1 or 77."""
        parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
        parser.add_argument("--device", default="cuda", help="type of device: cuda, sim, ...")
        parser.add_argument("--small", action="store_true", help="small sizes, which show the logic only")
        options = parser.parse_args()
        print(f"expected: {expected}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            check = Check(options.device, Path(folder), is_small=options.small)
            main(check)
        print("holds" if check.holds else "does not hold", flush=True)
        raise SystemExit(0 if check.holds else 1)

    @staticmethod
    def skip(reason: str) -> NoReturn:
        """End the check: the device lacks what it needs."""
        print(f"skipped: {reason}", flush=True)
        raise SystemExit(SKIPPED)

    @staticmethod
    def leave_out(part: str, reason: str) -> None:
        """Report that a part of the check is not run here."""
        print(f"{part}: not run: {reason}", flush=True)

    def expect(self, name: str, figure: object, expected: str, *, holds: bool) -> None:
        """Print a figure with what is expected of it; the check holds where all of its figures do."""
        self.holds &= holds
        print(f"{name}: {figure} (expected: {expected}){'' if holds else '  DOES NOT HOLD'}", flush=True)

    @staticmethod
    def figure(name: str, figure: object) -> None:
        """Print a figure of which nothing is expected."""
        print(f"{name}: {figure}", flush=True)

    def choose(self, full: Any, small: Any) -> Any:
        """Return the size to use."""
        return small if self.is_small else full

    @staticmethod
    def synchronize() -> None:
        """Wait for the current device."""
        if torch.accelerator.current_accelerator() is not None:
            torch.accelerator.synchronize()

    def keep_busy(self, seconds: float) -> None:
        """Keep the current stream busy for about this time, without waiting here."""
        if self.simulated is not None:
            self.simulated.sleep(seconds)
        elif self.kind == "cuda":
            torch.cuda._sleep(int(seconds * BUSY_CYCLES_PER_S))
        else:
            self.skip(f"nothing keeps {self.kind} busy for a given time")

    @contextmanager
    def no_synchronization(self) -> Iterator[None]:
        """Raise where the host waits for the device: CUDA in any thread, the simulated one in this thread."""
        if self.simulated is not None:
            with self.simulated.no_synchronization():
                yield
        elif self.kind == "cuda":
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        else:
            self.skip(f"{self.kind} has no mode in which a synchronisation is an error")
