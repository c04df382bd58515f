"""Two checks that hold by algebra, for every parameter (docs/formulas.md, section 3).

Coverage, at every measurement: ``sum_nm K_nm = |sum_n g_n|^2 = |p.grad|^2``, the gradient being that of
autograd. It detects a use of a parameter that no kernel captured, a tie, a scale. Independence: for two
samples a and b that are run alone, ``K_aa + 2 K_ab + K_bb`` is the squared norm of their gradient. It detects
samples that influence one another (batch statistics), a loss that is a mean, and samples along another
dimension; :class:`CheckSchedule` decides when it is due.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class GramError(ValueError):
    """A Gram that cannot be measured, or failed a check; the message names the parameter."""


@dataclass(frozen=True)
class Coverage:
    """Method by which the Gram of a parameter was computed, and the results of its checks.

    ``method`` is ``ghost``, ``chunked``, ``vectors``, ``vmap``, ``loop``, or ``unused`` where the loss does
    not depend on the parameter. ``from_gram`` is the root of the sum of all entries of K, ``from_gradient``
    the norm of autograd's gradient of the summed loss; they may differ by ``tolerance``. ``alone`` has the
    same two for two samples that were run alone; None if this was not checked, because the forward pass draws
    random numbers or an earlier measurement of the same kind passed.
    """

    method: str
    from_gram: float
    from_gradient: float
    tolerance: float
    alone: tuple[float, float] | None = None

    @property
    def difference(self) -> float:
        """Relative difference of the two norms; 0 where both are 0."""
        largest = max(self.from_gram, self.from_gradient)
        return abs(self.from_gram - self.from_gradient) / largest if largest > 0 else 0.0

    @property
    def holds(self) -> bool:
        """Whether Gram and gradient agree."""
        return abs(self.from_gram - self.from_gradient) <= self.tolerance


def coverage(
    method: str, total: float, magnitude: float, gradient: float, summands: float, eps: float
) -> Coverage:
    """Return the coverage check of one parameter.

    ``total`` is the sum of all entries of K, ``magnitude`` that of their magnitudes, ``gradient`` the norm of
    the gradient of the summed loss. ``summands`` is the root of the summed squares of what both were added up
    from: rounding is measured against it, since a gradient may cancel to nothing (a bias of keys before a
    softmax). ``eps`` is the machine epsilon of the coarsest type involved.
    """
    norm = math.sqrt(max(0.0, total))
    slack = 16 * eps * (summands + gradient) + root_slack(magnitude, norm + gradient)
    return Coverage(method, norm, gradient, slack)


def root_slack(magnitude: float, norms: float) -> float:
    """Return the rounding error of the root of a sum whose terms have magnitudes of sum ``magnitude``."""
    rounding = 16 * sys.float_info.epsilon * magnitude
    return rounding / max(norms, math.sqrt(rounding)) if rounding > 0 else 0.0


def coverage_error(name: str, found: Coverage, samples: int) -> GramError:
    """Return the error of a failed coverage."""
    got, expected = found.from_gram, found.from_gradient
    hint = "a use of the parameter uncaptured the capture, or a hook changes its gradient"
    if found.method in {"vmap", "loop"} and _near(got, expected * samples):
        hint = _mean(samples)
    return GramError(
        f"gram: the coverage of parameter {name!r} failed: expected the norm {expected:.6g} of its gradient, "
        f"got {got:.6g} from its Gram ({found.method}); {hint}"
    )


def independence_error(
    name: str, method: str, norms: tuple[float, float], noise: float, eps: float, samples: int, pair: int
) -> GramError | None:
    """Return the error in the gradient of ``pair`` samples run alone; None if it matches the Gram.

    ``norms`` are the norm from the Gram and the norm from autograd, ``noise`` their rounding error.
    """
    got, expected = norms
    # Another batch size takes other kernels; a pass in fp32 differs by far less than a thousandth.
    share = min(0.2, max(1e-8, 1e4 * eps if eps < 1e-4 else 16 * eps))
    if abs(got - expected) <= share * max(got, expected) + noise:
        return None
    hint = (
        "samples do not seem to be independent along the first dimension of the batch's tensors: the loss "
        "must be a sum over them, and no layer may mix them (batch statistics)"
    )
    if samples > pair and _near(expected, got * samples / pair):
        hint = _mean(samples)
    return GramError(
        f"gram: parameter {name!r}: the gradient of {pair} samples alone has norm {expected:.6g}, their part "
        f"of the Gram ({method}) gives {got:.6g}; {hint}"
    )


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 0.02 * max(a, b)


def _mean(samples: int) -> str:
    return (
        f"the loss looks like a mean over {samples} samples: return their sum "
        "(reduction='sum', or the mean times the number of samples)"
    )


def epsilon(dtype: torch.dtype, device: torch.device) -> float:
    """Return the machine epsilon of products in ``dtype`` on ``device``."""
    eps = torch.finfo(dtype).eps
    tf32 = device.type == "cuda" and (
        torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    )
    return max(eps, 2.0**-10) if tf32 and dtype == torch.float32 else eps


_PASSED: weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[Any, dict[Hashable, int]]]
_PASSED = weakref.WeakKeyDictionary()


class CheckSchedule:
    """When samples are run alone: at the first, second, fourth, eighth … measurement of one kind.

    Independence is a property of the model and the loss function, not of the numbers, except where training
    changes it (a mixing layer that starts at zero). So the check recurs, ever more rarely, while model, loss
    function, training mode and the shapes of the batch stay the same. A loss function is identified by its
    identity, a bound method by that of its object; one that is made anew for each measurement, or cannot be
    referenced weakly, is new each time.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Any], shapes: Hashable) -> None:
        function = getattr(loss_fn, "__func__", None)
        self._kind = (
            function,
            shapes,
            tuple(module.training for module in model.modules()),
            tuple(parameter.requires_grad for parameter in model.parameters()),
            torch.is_autocast_enabled(),
        )
        owner = loss_fn if function is None else loss_fn.__self__  # type: ignore[attr-defined]
        try:
            self._counts = _PASSED.setdefault(model, weakref.WeakKeyDictionary()).setdefault(owner, {})
        except TypeError:
            self._counts = {}

    def due(self) -> bool:
        """Return whether samples are run alone at this measurement."""
        number = self._counts.get(self._kind, 0) + 1
        return number & (number - 1) == 0

    def passed(self) -> None:
        """Count a measurement without evidence against independence."""
        self._counts[self._kind] = self._counts.get(self._kind, 0) + 1
