"""All monitors under `set_sync_debug_mode("error")`.

CUDA raises it in every thread. The worker thread of `spectra` reads what it has measured and waits for it: it
runs under the mode "warn", and only what warns in the training thread counts. `grokking` reads its gradients
at the steps that it logs, so that only those between them are compared.
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
from backlight.monitors.grokking.monitor import LOG_SPACING

EXPECTED = (
    "no call of the training thread waits for the device, but for those of `grokking` at the steps that it "
    "logs; all steps are recorded"
)
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


def waits_of_grokking(check: Check) -> list[int]:
    """Return how often the training thread waits for the device, by step."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(check.kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 16).to(check.kind), torch.randint(4, (16,)).to(check.kind)
    found = []
    with backlight.watch(
        model,
        optimizer,
        run=check.folder / "grokking",
        every=1,
        monitors=("grokking",),
        samples=(lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), (x, y)),
        quiet=True,
        summary=False,
    ):
        for _ in range(STEPS):
            waits: list[str] = []
            before = _simulated_waits(check)
            with contextlib.nullcontext() if check.simulated is not None else counted(check, waits):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            found.append(len(waits) + _simulated_waits(check) - before)
    return found


def _simulated_waits(check: Check) -> int:
    if check.simulated is None:
        return 0
    return int(check.simulated.counts(check.simulated.SYNCHRONIZATION).get("MainThread", 0))


def main(check: Check) -> None:
    """Default monitors under "error", then spectra with them under "warn"."""
    try:
        train(check, "default", check.no_synchronization, health={"histogram": True, "exact_updates": 1})
    except RuntimeError as error:
        check.expect("default: error of a step", str(error).partition("\n")[0], "none", holds=False)
    steps = len(backlight.open_run(check.folder / "default").series_steps("gradient"))
    check.expect("default: recorded steps", steps, str(STEPS), holds=steps == STEPS)
    waits: list[str] = []
    train(check, "spectra", lambda: counted(check, waits), monitors=("health", "spectra"))
    check.expect("spectra: waits of the training thread", waits, "[]", holds=not waits)
    measured = len(backlight.open_run(check.folder / "spectra").events("spectra_measured"))
    check.expect("spectra: measured layers", measured, "some", holds=measured > 0)
    by_step = waits_of_grokking(check)
    others = sum(count for step, count in enumerate(by_step) if step % LOG_SPACING)
    check.figure("grokking: waits at step 0 and at the next that it logs", by_step[::LOG_SPACING])
    check.expect("grokking: waits at other steps", others, "0", holds=others == 0)


if __name__ == "__main__":
    Check.run(main, EXPECTED)
