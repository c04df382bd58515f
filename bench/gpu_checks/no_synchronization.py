"""All monitors under `set_sync_debug_mode("error")`.

CUDA raises it in every thread. The worker thread of `spectra` reads what it has measured and waits for it: it
runs under the mode "warn", and only what warns in the training thread counts.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from check import Check
from torch import nn

import backlight

EXPECTED = "no call of the training thread waits for the device, and all steps are recorded"
STEPS = 12


@contextlib.contextmanager
def counted(check: Check, waits: list[str]) -> Iterator[None]:
    """Collect the synchronisations of this thread, those of other threads being legitimate."""
    if check.simulated is not None:
        with check.no_synchronization():
            yield
        return
    thread = threading.get_ident()

    def show(message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        if threading.get_ident() == thread and "synchroniz" in str(message):
            waits.append(f"{filename}:{line}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def train(check: Check, name: str, mode: Any, **settings: Any) -> None:
    """Train under a mode after two steps, in which streams and buffers are made."""
    width = check.choose(256, 16)
    model = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 10))
    model.to(check.kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(64, width).to(check.kind), torch.randint(10, (64,)).to(check.kind)
    run = check.folder / name
    with backlight.watch(model, optimizer, run=run, every=1, quiet=True, summary=False, **settings) as watch:
        for number in range(STEPS):
            with mode() if number >= 2 else contextlib.nullcontext():
                optimizer.zero_grad()
                for _ in range(3):
                    loss = F.cross_entropy(model(x + torch.rand_like(x)), y)
                    loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                watch.log(mine=loss.detach())
    opened = backlight.open_run(run)
    lost = [str(loss) for loss in opened.losses]
    check.expect(f"{name}: what was lost", lost, "[]", holds=not lost)
    gaps = {event.payload["what"] for event in opened.events("unmeasured")}
    check.figure(f"{name}: not measured", sorted(gaps) or "nothing")


def main(check: Check) -> None:
    """Default monitors under "error", then spectra with them under "warn"."""
    try:
        train(check, "default", check.no_synchronization, histogram=True, exact_updates=1)
    except RuntimeError as error:
        check.expect("default: error of a step", str(error).partition("\n")[0], "none", holds=False)
    steps = len(backlight.open_run(check.folder / "default").series_steps("gradient"))
    check.expect("default: recorded steps", steps, str(STEPS), holds=steps == STEPS)
    waits: list[str] = []
    train(check, "spectra", lambda: counted(check, waits), monitors=("health", "spectra"))
    check.expect("spectra: waits of the training thread", waits, "[]", holds=not waits)
    measured = len(backlight.open_run(check.folder / "spectra").events("spectra_measured"))
    check.expect("spectra: measured layers", measured, "some", holds=measured > 0)


if __name__ == "__main__":
    Check.run(main, EXPECTED)
