"""Independence of samples: gradients of some that are run without the others, against what their Gram holds.

Three sets of samples are run: one sample, another one, and a random half, whose complement is the difference
to the whole gradient. With ``g_x`` the gradient of a set, ``<g_x, g_y>`` is the sum of K over rows x and
columns y, each compared separately (docs/formulas.md, section 3). This detects samples that influence one
another (batch statistics), a loss that is a mean, and samples along another dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backlight.capture.batches import map_tensors
from backlight.capture.model_state import PreservedState, in_float64
from backlight.capture.per_sample import Call
from backlight.interrupts import is_interrupt
from backlight.monitors.grokking.instrument.gram.checks import DEPENDENT, GramError, looks_like_mean
from backlight.monitors.grokking.instrument.gram.inputs import ALONE, doubled

if TYPE_CHECKING:
    from backlight.monitors.grokking.instrument.gram.gram_measurement import GramMeasurement

ROUNDINGS = 64
"""Largest deviation, in units of the machine epsilon, that rounding of the working precision explains. On
twelve networks the largest found was 34 (20 layers of tanh, trained); a gradient that nearly vanishes, as
that of a sample that was learned by heart, has more, and is compared again in float64."""

IN_FLOAT64 = 1e-8
"""Largest deviation in float64."""

IN_WORKING_PRECISION = {1e-4: 1.2e-3, 1.0: 0.2}
"""Largest deviation where there is no float64 to compare in, by the machine epsilon below which it holds."""

Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Sets:
    """Sets of samples that are run alone: two single samples, and a random half of more than two."""

    weights: Tensor  # float64 [s, N], 1 for the samples of a set
    half: bool  # the last set is the half

    @classmethod
    def of(cls, K: Tensor, number: int) -> Sets:
        """Choose the samples with the largest gradients, and for each ``number`` another half."""
        n = len(K)
        rows = torch.zeros(2, n, dtype=torch.float64)
        rows[[0, 1], K.diagonal().topk(2).indices.cpu()] = 1
        if n > 2:
            half = torch.zeros(1, n, dtype=torch.float64)
            half[0, torch.randperm(n, generator=torch.Generator().manual_seed(number))[: n // 2]] = 1
            rows = torch.cat([rows, half])
        return cls(rows, half=n > 2)

    def indices(self) -> list[Tensor]:
        """Return the samples of each set."""
        return [row.nonzero().flatten() for row in self.weights]

    def pairs(self) -> Tensor:
        """Return the sets whose products are compared: the singles, then the half and its complement."""
        return torch.cat([self.weights, 1 - self.weights[-1:]]) if self.half else self.weights

    def without_singles(self) -> Sets:
        """Return the half only."""
        return Sets(self.weights[-1:], half=True)

    def products(self, gradients: Sequence[Gradients], whole: Gradients, name: str) -> Tensor:
        """Return the products of the gradients of a parameter, float64 ``[s, s]``, in the order of pairs."""
        rows = [_dense(of_set[name], whole[name]) for of_set in gradients]
        if self.half:
            rows.append(_dense(whole[name], whole[name]) - rows[-1])
        stacked = torch.stack(rows)
        return stacked @ stacked.T


def _dense(gradient: Tensor | None, like: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(1 if like is None else like.numel(), dtype=torch.float64, device=_device(like))
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach().double().flatten()


def _device(like: Tensor | None) -> torch.device | None:
    return None if like is None else like.device


@dataclass(frozen=True)
class Deviation:
    """How a Gram deviates from gradients run alone, relative to what both are added up from."""

    samples: int  # of the set
    from_gram: float  # norm
    alone: float  # norm
    relative: float
    allowed: float

    def error(self, name: str, method: str, samples: int) -> GramError:
        """Return the error of a parameter whose Gram, of so many samples in a pass, deviates too much."""
        mean = looks_like_mean(self.alone, self.from_gram, samples / self.samples, samples)
        which = "one sample" if self.samples == 1 else f"{self.samples} samples"
        return GramError(
            f"gram: parameter {name!r}: the gradient of {which} alone has norm {self.alone:.6g}, its part of "
            f"the Gram ({method}) has norm {self.from_gram:.6g}, and they differ by {self.relative:.2g}; "
            f"{mean or DEPENDENT}"
        )


def deviations(
    expected: Tensor, measured: Tensor, sizes: Tensor, members: Sequence[int], allowed: float
) -> list[Deviation]:
    """Compare products ``[s, s]`` entry by entry, and return the largest deviation of each pair of sets.

    ``sizes [s]`` are roots of the summed squares of what the gradients were added up from. Rounding is
    relative to these, since a gradient may cancel to nothing, or to the gradient where all of it adds up.
    """
    out = []
    sizes = torch.maximum(sizes, expected.diagonal().clamp(min=0).sqrt())
    for begin in range(0, len(members), 2):
        part = slice(begin, begin + 2)
        difference = (expected[part, part] - measured[part, part]).abs()
        scale = sizes[part, None] * sizes[None, part]
        relative = torch.where(difference > 0, difference / scale.clamp(min=1e-300), 0.0)
        at = int(relative.amax(1).argmax())
        got, alone = (float(x[begin + at, begin + at].clamp(min=0).sqrt()) for x in (measured, expected))
        out.append(Deviation(members[begin + at], got, alone, float(relative.max()), allowed))
    return out


def vector_deviations(
    alone: Sequence[Gradients],
    combined: Tensor,
    name: str,
    sizes: Tensor,
    members: Sequence[int],
    allowed: float,
) -> list[Deviation]:
    """Compare gradients of sets ``[s, *shape]`` with those that were run alone."""
    out = []
    for gradients, row, size, count in zip(alone, combined, sizes.tolist(), members, strict=False):
        vector = _dense(gradients[name], row)
        away = float((row.flatten() - vector.to(row)).norm())
        norms = float(row.norm()), float(vector.norm())
        out.append(Deviation(count, *norms, away / max(size, *norms) if away > 0 else 0.0, allowed))
    return out


def worst(deviations: Sequence[Deviation]) -> Deviation | None:
    """Return the largest deviation that is not allowed; None if all are."""
    beyond = [deviation for deviation in deviations if not deviation.relative <= deviation.allowed]
    return max(beyond, key=lambda deviation: deviation.relative) if beyond else None


def routed(alone: Sequence[Call], count: int, calls: Sequence[Call], samples: int) -> bool:
    """Return whether the calls of modules depend on the data, beyond the number of samples.

    ``calls`` are those of so many ``samples``, ``alone`` those of ``count`` of them.
    """
    return len(alone) != len(calls) or not all(
        _scaled(a, b, count, samples) for a, b in zip(alone, calls, strict=True)
    )


def _scaled(call: Call, of: Call, count: int, samples: int) -> bool:
    (module, shape), (other, whole) = call, of
    if module != other or len(shape) != len(whole):
        return False
    changed = [(a, b) for a, b in zip(shape, whole, strict=True) if a != b]
    return not changed or (len(changed) == 1 and changed[0][0] * samples == changed[0][1] * count)


class Independence:
    """The check of one measurement: first against its Gram, then, where that leaves doubts, in float64."""

    def __init__(
        self, measurement: GramMeasurement, state: PreservedState, drew: bool, accumulated: bool
    ) -> None:
        self._of, self._state, self._drew, self._accumulated = measurement, state, drew, accumulated
        self._parameters = measurement.parameters

    def failures(self, whole: Gradients, skipped: set[str]) -> dict[str, GramError]:
        """Return the errors of parameters whose Gram does not fit; those of ``skipped`` are not compared.

        ``whole`` are the gradients of all samples. What could not be checked is left in the history.
        """
        of, history = self._of, self._of.history
        names = [
            name
            for name, p in self._parameters.items()
            if p.method and p.method not in ALONE and name not in skipped and not p.uncaptured
        ]
        if of.sets is None or not names:
            history.unchecked = ""
            return {}
        if not self._drew:
            deviations = self._compared(of.sets, whole, names)
            coarse = max(self._parameters[name].eps for name in names) > 1e-4
            names = [name for name, of_name in deviations.items() if coarse or worst(of_name)]
            if not names:
                history.unchecked = ""
                return {}
        precise = self._again(of.sets, names)
        history.unchecked = precise if isinstance(precise, str) else ""
        if isinstance(precise, str):
            if self._drew:
                return {}
            precise = {
                name: [replace(d, allowed=_allowed(self._parameters[name].eps)) for d in deviations[name]]
                for name in names
            }
            history.unchecked = ""
        return self._errors(precise)

    def _compared(self, sets: Sets, whole: Gradients, names: Sequence[str]) -> dict[str, list[Deviation]]:
        """Compare in the working precision, against the Gram."""
        of = self._of
        sets, gradients, calls = self._run(sets)
        whole_sets = [(c, len(i)) for c, i in zip(calls, sets.indices(), strict=True) if len(i) <= of.at_once]
        of.history.routed |= any(routed(c, count, of.calls[0], of.at_once) for c, count in whole_sets)
        pairs = sets.pairs()
        members = [int(row.sum()) for row in pairs]
        out = {}
        for name in names:
            parameter = self._parameters[name]
            expected = sets.products(gradients, whole, name).cpu()
            size = (pairs @ parameter.sizes.square()).sqrt()
            entries = parameter.entries[-len(pairs) :, -len(pairs) :]
            out[name] = deviations(expected, entries, size, members, ROUNDINGS * parameter.eps)
            parameter.independence = max(deviation.relative for deviation in out[name])
        return out

    def _run(self, sets: Sets) -> tuple[Sets, list[Gradients], list[list[Call]]]:
        """Run each set alone; single samples are left out where the loss function cannot take one."""
        gradients: list[Gradients] = []
        calls: list[list[Call]] = []
        for index in sets.indices():
            try:
                of_set, made = self._of.alone(index, self._accumulated)
            except GramError:
                raise
            except Exception as error:
                if is_interrupt(error):
                    raise
                if sets.half and len(index) == 1 and len(sets.weights) > 1:
                    return self._run(sets.without_singles())
                raise GramError(
                    f"gram: loss_fn fails on a batch of {len(index)} of the {self._of.samples} samples "
                    f"({type(error).__name__}: {error}); it must take any number of samples along the first "
                    "dimension"
                ) from error
            self._state.rewind()
            gradients.append(of_set)
            calls.append(made)
        return sets, gradients, calls

    def _again(self, sets: Sets, names: Sequence[str]) -> dict[str, list[Deviation]] | str:
        """Compare in float64 and without dropout, gradients from the factors with those run alone.

        Return why this is not possible.
        """
        reason = ""
        for precise in (True, False) if self._drew else (True,):
            try:
                return self._evaluated(sets, names, precise)
            except Exception as error:
                if is_interrupt(error):
                    raise
                reason = str(error) if isinstance(error, _NotPossible) else f"{type(error).__name__}: {error}"
            finally:
                self._state.rewind()
        return reason.split("\n")[0]

    def _evaluated(self, sets: Sets, names: Sequence[str], precise: bool) -> dict[str, list[Deviation]]:
        with self._probe(precise) as probe:
            device = next(iter(probe.parameters.values())).tensor.device
            combined = probe.combined_now(dict.fromkeys(names, sets.weights.to(device)))
        alone = []
        for index in sets.indices():
            with self._probe(precise) as probe:
                alone.append(probe.alone(index, self._accumulated)[0])
        members = [len(index) for index in sets.indices()]
        out = {}
        for name in names:
            parameter = self._parameters[name]
            size = (sets.weights @ parameter.sizes.square()).sqrt()
            allowed = IN_FLOAT64 if precise else _allowed(parameter.eps)
            out[name] = vector_deviations(alone, combined[name], name, size, members, allowed)
            parameter.independence = max(deviation.relative for deviation in out[name])
        return out

    @contextlib.contextmanager
    def _probe(self, precise: bool) -> Iterator[GramMeasurement]:
        """Return a measurement of the model without dropout, and in float64 if ``precise``."""
        of = self._of
        self._state.rewind()
        with in_float64(of.model) if precise else contextlib.nullcontext():
            if self._drew:
                of.model.eval()
            batch = map_tensors(of.batch, doubled) if precise else of.batch
            probe = replace(of, batch=batch, products=torch.float64)
            probe.history = of.history
            probe._reset()
            yield probe
            if self._state.drew and self._drew:
                raise _NotPossible("the forward pass draws random numbers in evaluation mode as well")

    def _errors(self, deviations: Mapping[str, Sequence[Deviation]]) -> dict[str, GramError]:
        beyond = {name: largest for name, of in deviations.items() if (largest := worst(of)) is not None}
        return {
            name: largest.error(name, self._parameters[name].method, self._of.at_once)
            for name, largest in beyond.items()
        }


class _NotPossible(Exception):  # noqa: N818 - a reason, not an error
    """Why samples cannot be compared."""


def _allowed(eps: float) -> float:
    return next(share for limit, share in IN_WORKING_PRECISION.items() if eps < limit)
