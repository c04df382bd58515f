"""Coupling of samples, tested by the loss where passes draw random numbers (dropout).

Samples that are run without the others get other random numbers, so their gradients cannot be compared with
what the Gram holds. The loss can: under one random state, with contents A or A' for half of the samples and
B or B' for the others, a sum over independent samples has ``L(A, B) - L(A', B) - L(A, B') + L(A', B') = 0``,
since the losses of one half do not change with the contents of the other. Whatever couples them (statistics
of the batch, negatives in it, a sort or a top-k over it) leaves a difference (docs/formulas.md, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from backlight.capture.batches import map_tensors, tensors_in
from backlight.capture.model_state import PreservedState, in_float64
from backlight.capture.modules import walk
from backlight.capture.per_sample import Call, Taps
from backlight.interrupts import is_interrupt
from backlight.monitors.grokking.instrument.gram.checks import GramError
from backlight.monitors.grokking.instrument.gram.inputs import doubled, eager, scalar, some

if TYPE_CHECKING:
    from backlight.monitors.grokking.instrument.gram.gram_measurement import GramMeasurement

IN_FLOAT64 = 1e-8
"""Largest mixed difference in float64, relative to the largest of the losses."""

IN_WORKING_PRECISION = 1e-3
"""The same where the model does not run in float64."""

HALVES = 3
"""Random halves that are tried: a sort or a top-k may leave the contents of one as they are."""

Rows = tuple[str, list[Tensor], list[Tensor]]


class Coupling:
    """The test of the samples of one pass, under the random state of the measurement."""

    def __init__(self, measurement: GramMeasurement, state: PreservedState) -> None:
        self._of, self._state = measurement, state
        self._order = torch.arange(measurement.at_once)
        self._first = self._order < 0  # mask of the first half

    def refuse(self) -> None:
        """Raise a GramError that names the module in which samples are coupled, if they are."""
        if len(self._order) < 2:
            return
        for number in range(HALVES):
            draw = torch.Generator().manual_seed(number)
            self._order = torch.randperm(len(self._order), generator=draw)
            self._first = torch.zeros_like(self._first)
            self._first[self._order[: len(self._order) // 2]] = True
            self._compare()

    def _compare(self) -> None:
        for precise in (True, False):
            try:
                difference, scale, comparable = self._mixed_difference(precise)
            except Exception as error:
                if is_interrupt(error):
                    raise
                continue  # a model that fixes its type, or a loss that needs these very samples
            finally:
                self._state.rewind()
            allowed = (IN_FLOAT64 if precise else IN_WORKING_PRECISION) * scale
            if comparable and not abs(difference) <= allowed:
                raise self._error(difference, scale, precise)
            return

    def _batch(self, change_first: bool, change_second: bool) -> Any:
        """Return the samples of the pass, those of a half replaced by those of the other half."""
        halves = [self._order[: len(self._order) // 2], self._order[len(self._order) // 2 :]]
        index = torch.arange(len(self._order))
        for (to, source), change in zip((halves, halves[::-1]), (change_first, change_second), strict=True):
            if change:
                index[to] = source[torch.arange(len(to)) % len(source)]
        return some(self._of.batch, index)

    def _mixed_difference(self, precise: bool) -> tuple[float, float, bool]:
        """Return the mixed difference, the largest loss, and whether the passes made the same calls.

        Where routing depends on the contents, a sample gets other random numbers when others change.
        """
        losses: list[float] = []
        calls: list[list[Call]] = []
        for contents in ((False, False), (True, False), (False, True), (True, True)):
            loss, made = self._loss(self._batch(*contents), precise)
            losses.append(loss)
            calls.append(made)
        both, second, first, neither = losses
        same = all(made == calls[0] for made in calls)
        return both - second - first + neither, max(map(abs, losses)), same

    def _loss(self, batch: Any, precise: bool) -> tuple[float, list[Call]]:
        of = self._of
        self._state.rewind()
        with in_float64(of.model) if precise else nullcontext():
            batch = map_tensors(batch, doubled) if precise else batch
            taps = Taps(of.modules, len(self._first), None)
            with torch.enable_grad(), eager(of.model), taps:  # re-entrant checkpointing warns without
                return float(scalar(of.loss_fn(of.model, batch)).detach()), list(taps.calls)

    def _error(self, difference: float, scale: float, precise: bool) -> GramError:
        where = self._module(precise)
        place = f"in {where}" if where else "in loss_fn, or where they do not lie along the first dimension"
        return GramError(
            f"gram: samples are coupled {place}: under one random state, other contents of half of the "
            f"samples change the losses of the others (mixed difference {difference:.3g} of a loss of "
            f"{scale:.3g}), so that samples have no gradient of their own. Remove what reads the batch as a "
            "whole (its mean or variance, negatives, a sort or a top-k), or call model.eval() if that ends it"
        )

    def _module(self, precise: bool) -> str:
        """Return the innermost module whose inputs stay, and whose outputs change, with other samples."""
        with self._recorded() as before:
            self._loss(self._batch(False, False), precise)
        with self._recorded() as after:
            self._loss(self._batch(False, True), precise)
        self._state.rewind()
        for (name, old_in, old_out), (_, new_in, new_out) in zip(before, after, strict=False):
            if old_in and _equal(old_in, new_in) and not _equal(old_out, new_out):
                return name
        return ""

    @contextmanager
    def _recorded(self) -> Iterator[list[Rows]]:
        """Record what each call of a module takes and returns for the samples of the first half."""
        rows: list[Rows] = []
        size, first = len(self._first), self._first

        def of_first(value: Any) -> list[Tensor]:
            return [x[first.to(x.device)].detach() for x in tensors_in(value) if x.ndim and len(x) == size]

        def record(name: str) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                label = f"module {name!r} ({type(module).__name__})" if name else "the forward of the model"
                rows.append((label, of_first((args, kwargs)), of_first(output)))

            return hook

        with ExitStack() as hooks:
            for name, module in walk(self._of.model):
                handle = module.register_forward_hook(record(name), with_kwargs=True)
                hooks.callback(handle.remove)
            yield rows


def _equal(old: list[Tensor], new: list[Tensor]) -> bool:
    return len(old) == len(new) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-6, atol=0, equal_nan=True)
        for a, b in zip(old, new, strict=True)
    )
