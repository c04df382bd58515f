"""Whole steps captured in a graph under watch, 20 times, and `mode="reduce-overhead"`.

A capture in the default mode ends with an error as soon as any thread of the process asks for an event, so
that the threads of backlight are kept at work meanwhile: every step around a capture is recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from check import Check
from torch import Tensor, nn

import backlight
from backlight.measure.stats.compiled_rows import c_compiler

EXPECTED = (
    "20 of 20 captures end; weights and losses are those without a watch, as two unwatched runs have them"
)
CAPTURES, REPLAYS = 20, 3


class Training:
    """A model whose whole step is captured."""

    def __init__(self, check: Check) -> None:
        torch.manual_seed(0)
        width = check.choose(512, 16)
        self.model = nn.Sequential(
            nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 10)
        )
        self.model.to(check.kind)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.x, self.y = torch.randn(64, width).to(check.kind), torch.randint(10, (64,)).to(check.kind)

    def step(self) -> Tensor:
        """Train one step; return its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@contextlib.contextmanager
def simulated_capture(check: Check) -> Iterator[None]:
    """Capture on the simulated device, which runs the step at once instead of keeping it."""
    graph = check.simulated.SimulatedGraph()
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


def capture(check: Check, training: Training) -> None:
    """Capture a step, and replay it."""
    if check.simulated is not None:
        with simulated_capture(check):
            training.step()
        replay: Any = training.step
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            training.step()
        replay = graph.replay
    for _ in range(REPLAYS):
        replay()


def train(check: Check, run: str) -> tuple[int, list[Tensor]]:
    """Return how many captures ended, and the weights after them; ``run`` is empty without a watch."""
    training, ended = Training(check), 0
    watch: Any = contextlib.nullcontext()
    if run:
        watch = backlight.watch(
            training.model,
            training.optimizer,
            run=check.folder / run,
            every=1,
            flush_interval=0.01,
            quiet=True,
            summary=False,
        )
    with watch:
        # As torch asks for: the steps before the first capture run on a side stream.
        side = torch.Stream(check.kind)
        side.wait_stream(torch.accelerator.current_stream(check.kind))
        with side:
            for _ in range(3):
                training.step()
        torch.accelerator.current_stream(check.kind).wait_stream(side)
        for number in range(CAPTURES):
            for _ in range(2):
                training.step()  # its copies are on their way as the capture begins
            try:
                capture(check, training)
            except RuntimeError as error:
                check.figure(f"capture {number}", str(error).partition("\n")[0])
                break
            ended += 1
    return ended, [parameter.detach().cpu() for parameter in training.model.parameters()]


def compiled(check: Check, run: str) -> list[float]:
    """Return the losses of a model compiled with ``reduce-overhead``, which captures its graphs itself."""
    training = Training(check)
    forward = torch.compile(training.model, mode="reduce-overhead")
    watch: Any = contextlib.nullcontext()
    if run:
        watch = backlight.watch(
            training.model, training.optimizer, run=check.folder / run, every=1, quiet=True, summary=False
        )
    losses = []
    with watch:
        for _ in range(check.choose(30, 3)):
            training.optimizer.zero_grad()
            loss = F.cross_entropy(forward(training.x), training.y)
            loss.backward()
            training.optimizer.step()
            losses.append(loss.detach().clone())
    return [float(loss) for loss in losses]


def differs(one: Tensor, other: Tensor) -> bool:
    """Return whether any bit of two tensors differs."""
    return not torch.equal(one, other)


def main(check: Check) -> None:
    """Compare watched with unwatched."""
    if check.kind not in {"cuda", "sim"}:
        check.skip(f"torch captures no graphs on {check.kind}")
    (_, alone), (_, again) = train(check, ""), train(check, "")
    ended, watched = train(check, "run")
    check.expect("captures that ended", ended, str(CAPTURES), holds=ended == CAPTURES)
    control, differ = (sum(map(differs, alone, other)) for other in (again, watched))
    check.figure("parameters that differ between two unwatched runs", control)
    check.expect("parameters that differ", differ, f"{control}, as without a watch", holds=differ <= control)
    recorded = len(backlight.open_run(check.folder / "run").series_steps("gradient"))
    check.expect(
        "recorded steps", recorded, f"at least {3 + 2 * CAPTURES}", holds=recorded >= 3 + 2 * CAPTURES
    )
    if check.kind != "cuda":
        check.leave_out("reduce-overhead", f"Inductor has no back-end for {check.kind}")
        return
    if not c_compiler():
        check.leave_out("reduce-overhead", "Triton needs a C compiler, and there is none")
        return
    alone_losses, again_losses, losses = (compiled(check, run) for run in ("", "", "compiled"))
    control, most = (
        max(abs(one - other) for one, other in zip(alone_losses, found, strict=True))
        for found in (again_losses, losses)
    )
    expected = f"at most {control}, as between two unwatched runs"
    check.expect("reduce-overhead, largest difference of losses", most, expected, holds=most <= control)


if __name__ == "__main__":
    Check.run(main, EXPECTED)
