"""What a prediction says: numbers and a ledger, without torch, so that they travel between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from backlight.diagnose.memory.account import Account
from backlight.diagnose.memory.storage_log import Kind

GRANULE = 512
"""Bytes to which CUDA's caching allocator rounds a request up."""

CONTEXT = (300 * 2**20, 1200 * 2**20)
"""Bytes that a CUDA context with its libraries takes: it depends on device, driver and kernels."""

COMMUNICATION = (64 * 2**20, 1024 * 2**20)
"""Bytes that NCCL takes for a communicator on one device: channels, protocols and ranks decide."""


class PredictionError(ValueError):
    """A step cannot be predicted: what, where in the recipe, and the way out."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one step, by the formulas of :mod:`torch.utils.flop_counter`.

    Attributes
    ----------
    forward, backward:
        Of the forward with the loss, and of the backward; a multiplication and an addition are two.
    recomputed:
        Those of the backward that compute a checkpointed forward again; a part of ``backward``.
    modules:
        Those of the forward by module, each with what is inside it.
    """

    forward: int
    backward: int
    recomputed: int
    modules: Mapping[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """All of a step; those of the optimizer are not counted."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Logits:
    """The logits of a classifier or a language model, as its loss takes them.

    Attributes
    ----------
    shape, nbytes:
        Of the tensor that the softmax reads.
    copies, live:
        Further storages of as many elements that the step makes at most at a time, and the bytes of all of
        them with the logits.
    formula:
        Elements times (bytes of the logits' type + 4), for the logits and one fp32 copy.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    copies: int
    live: int
    formula: int


@dataclass(frozen=True)
class Blocks:
    """Modules of one structure that stand side by side."""

    parent: str
    type: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Prediction:
    """The memory of one training step.

    Attributes
    ----------
    peak:
        Bytes at the peak of a step after the first, each storage rounded up to the account's granule.
    exact:
        The same without rounding.
    kinds:
        ``peak`` by kind; every kind is named.
    phase:
        Phase of the step at the peak.
    begin:
        Bytes between steps: what stays.
    parameters, trainable:
        Numbers of elements, a tied one once.
    built:
        How the model came to be: ``meta``, ``piecewise`` (one parameter at a time) or ``real``.
    seconds:
        That the prediction took, without the start of the process.
    account:
        The steps in detail: curve, modules, live set.
    """

    peak: int
    exact: int
    kinds: Mapping[Kind, int]
    phase: str
    begin: int
    parameters: int
    trainable: int
    flops: Flops
    logits: Logits | None
    blocks: tuple[Blocks, ...]
    built: str
    seconds: float
    account: Account = field(repr=False)
