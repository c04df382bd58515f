"""Coverage, a check that holds by algebra for every parameter, and when checks are due.

Coverage: ``sum_nm K_nm = |sum_n g_n|^2 = |p.grad|^2``, the gradient being that of autograd. It detects a use
of a parameter that no kernel captured, a tie, a scale; independence of the samples is checked by
:mod:`backlight.monitors.grokking.instrument.gram.independence`. docs/formulas.md, section 3.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

DEPENDENT = (
    "samples do not seem to be independent along the first dimension of the batch's tensors: the loss must "
    "be a sum over them, and no layer may mix them (batch statistics)"
)


class GramError(ValueError):
    """A Gram that cannot be measured, or failed a check; the message names the parameter."""


@dataclass(frozen=True)
class GramCoverage:
    """Method by which the Gram of a parameter was computed, and the results of its checks.

    ``method`` is ``ghost``, ``chunked``, ``vectors``, ``vmap``, ``loop``, or ``unused`` where the loss does
    not depend on the parameter. ``from_gram`` is the root of the sum of all entries of K, ``from_gradient``
    the norm of autograd's gradient of the summed loss; they may differ by ``tolerance``. Both are None where
    this measurement was not checked, because an earlier one of the same kind was. ``independence`` is the
    largest deviation of K from gradients of samples that were run alone, relative to what they are added up
    from; None where this was not checked, or each sample was run alone (``vmap``, ``loop``).
    """

    method: str
    from_gram: float | None = None
    from_gradient: float | None = None
    tolerance: float = 0.0
    independence: float | None = None

    @property
    def difference(self) -> float | None:
        """Relative difference of the two norms, 0 where both are 0; None where they were not compared."""
        if self.from_gram is None or self.from_gradient is None:
            return None
        largest = max(self.from_gram, self.from_gradient)
        return abs(self.from_gram - self.from_gradient) / largest if largest > 0 else 0.0

    @property
    def holds(self) -> bool | None:
        """Whether Gram and gradient agree; None where they were not compared."""
        if self.from_gram is None or self.from_gradient is None:
            return None
        return abs(self.from_gram - self.from_gradient) <= self.tolerance


def coverage(
    method: str, total: float, magnitude: float, gradient: float, summands: float, eps: float
) -> GramCoverage:
    """Return the coverage check of one parameter.

    ``total`` is the sum of all entries of K, ``magnitude`` that of their magnitudes, ``gradient`` the norm of
    the gradient of the summed loss. ``summands`` is the root of the summed squares of what both were added up
    from: rounding is measured against it, since a gradient may cancel to nothing (a bias of keys before a
    softmax). ``eps`` is the machine epsilon of the coarsest type involved.
    """
    norm = math.sqrt(max(0.0, total))
    slack = 16 * eps * (summands + gradient) + root_slack(magnitude, norm + gradient)
    return GramCoverage(method, norm, gradient, slack)


def root_slack(magnitude: float, norms: float) -> float:
    """Return the rounding error of the root of a sum whose terms have magnitudes of sum ``magnitude``."""
    rounding = 16 * sys.float_info.epsilon * magnitude
    return rounding / max(norms, math.sqrt(rounding)) if rounding > 0 else 0.0


def coverage_error(name: str, check: GramCoverage, samples: int) -> GramError:
    """Return the error of a failed coverage."""
    got, expected = check.from_gram or 0.0, check.from_gradient or 0.0
    hint = "a use of the parameter escaped the capture, or a hook changes its gradient"
    if check.method in {"vmap", "loop"}:
        hint = looks_like_mean(got, expected, samples, samples) or DEPENDENT
    return GramError(
        f"gram: the coverage of parameter {name!r} failed: expected the norm {expected:.6g} of its gradient, "
        f"got {got:.6g} from its Gram ({check.method}); {hint}"
    )


def looks_like_mean(larger: float, smaller: float, ratio: float, samples: int) -> str:
    """Return the advice for a loss that is a mean if two norms have this ratio, else nothing."""
    if ratio <= 1 or abs(larger - smaller * ratio) > 0.02 * larger:
        return ""
    return (
        f"the loss looks like a mean over {samples} samples: return their sum "
        "(reduction='sum', or the mean times the number of samples)"
    )


def epsilon(dtype: torch.dtype, device: torch.device) -> float:
    """Return the machine epsilon of products in ``dtype`` on ``device``."""
    eps = torch.finfo(dtype).eps
    cudnn: Any = torch.backends.cudnn
    switches = torch.backends.cuda.matmul, cudnn.conv
    tf32 = device.type == "cuda" and any(switch.fp32_precision == "tf32" for switch in switches)
    return max(eps, 2.0**-10) if tf32 and dtype == torch.float32 else eps


@dataclass
class History:
    """What earlier measurements of one kind found."""

    checked: int = 0  # measurements without evidence against independence
    calls: Hashable = None  # of modules, at the last check
    sample_calls: list[Any] = field(default_factory=list)  # of modules, in a forward pass of one sample
    routed: bool = False  # calls depend on the data
    broadcast: bool = True  # inputs that samples share may be broadcast to all of them
    uncaptured: dict[str, str] = field(default_factory=dict)  # reason by parameter that no kernel measures
    unchecked: str = ""  # why independence was not checked; empty if it was


_PASSED: weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[Any, dict[Hashable, History]]]
_PASSED = weakref.WeakKeyDictionary()


class CheckSchedule:
    """When a measurement is checked: the first, second, fourth, eighth … of one kind.

    Coverage and independence are properties of the model and the loss function, not of the numbers, except
    where training changes them (a mixing layer that starts at zero). So the checks recur, ever more rarely,
    while model, loss function, training mode, the shapes of the batch and the calls of modules stay the same;
    where these calls depend on the data, every measurement is checked. A loss function is identified by its
    identity, a bound method by that of its object; one that is made anew for each measurement, or cannot be
    referenced weakly, is new each time.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Any], shapes: Hashable) -> None:
        function = getattr(loss_fn, "__func__", None)
        kind = (
            function,
            shapes,
            tuple(module.training for module in model.modules()),
            tuple(parameter.requires_grad for parameter in model.parameters()),
            torch.is_autocast_enabled(),
        )
        owner = loss_fn if function is None else loss_fn.__self__  # type: ignore[attr-defined]
        try:
            kinds = _PASSED.setdefault(model, weakref.WeakKeyDictionary()).setdefault(owner, {})
        except TypeError:
            kinds = {}
        self.history = kinds.setdefault(kind, History())

    def due(self) -> bool:
        """Return whether this measurement is checked whatever its calls."""
        number = self.history.checked + 1
        return self.history.routed or number & (number - 1) == 0

    def passed(self) -> None:
        """Count a measurement without evidence against independence."""
        self.history.checked += 1
