"""Probes of a model of sequences: which input positions its outputs and their gradients depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from backlight.diagnose.probes.result import Probe, ProbeOutcome, ProbeResult
from backlight.diagnose.probes.tape import TapedStep

IGNORED = -100
"""Target that torch's losses leave out."""

EQUAL_SHARE = 0.99
"""Share of the targets that equal the inputs at a distance, from which on that is their rule."""

DISTANCES = (0, -1, 1, 2, 3)
"""Distances between a target and the input that it may equal, the simplest explanation first."""

LOSSES = (functional.cross_entropy, functional.nll_loss)


class SequenceProbeError(ValueError):
    """The step is not that of a model of sequences; the message says why."""


class _Inputs(TorchFunctionMode):
    """Makes what the model looks up at each position a leaf of the graph, and notes the input of the loss."""

    def __init__(self, changed: tuple[int, int] | None) -> None:
        super().__init__()
        self.read: list[tuple[Tensor, Tensor | None]] = []
        self.scores: Tensor | None = None
        self.targets: Tensor | None = None
        self._changed = changed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``; replace the result of an embedding by a leaf."""
        kwargs = kwargs or {}
        arguments = dict(zip(("input", "target"), args, strict=False)) | kwargs
        if func in LOSSES:
            self.scores, self.targets = arguments["input"], arguments["target"]
        result = func(*args, **kwargs)
        if func is functional.embedding and result.ndim == 3:
            result = leaf_of(result, self._changed)
            self.read.append((result, arguments["input"]))
        return result


def leaf_of(values: Tensor, changed: tuple[int, int] | None) -> Tensor:
    """Return a leaf with these values, those of one ``(axis, position)`` changed by 1."""
    leaf = values.detach().clone()
    if changed is not None:
        leaf.select(*changed).add_(1.0)
    return leaf.requires_grad_()


@dataclass(frozen=True)
class Pass:
    """One pass of a model: ``leaves`` ``[A, B, D]``, the ``indices`` behind them, ``rows`` ``[A, B', V]``.

    One of the first two dimensions is the position, the other the sample. ``targets`` are those of the rows.
    """

    leaves: tuple[Tensor, ...]
    indices: Tensor | None
    rows: Tensor
    targets: Tensor | None

    def depends_on(self, axis: int, begin: int, end: int) -> Tensor:
        """Return the positions along ``axis`` that the gradient of the rows ``begin`` to ``end`` reaches."""
        rows = self.rows.narrow(axis, begin, end - begin)
        # A sum of values that are normalised is constant: random weights.
        weights = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)).to(rows)
        grads = torch.autograd.grad((rows * weights).sum(), self.leaves, retain_graph=True, allow_unused=True)
        reached = torch.zeros(self.leaves[0].shape[axis], dtype=torch.bool)
        for grad in grads:
            if grad is not None:
                reached |= (grad.detach() != 0).movedim(axis, 0).flatten(1).any(1).cpu()
        return reached.nonzero().flatten()


def replayed(step: TapedStep, changed: tuple[int, int] | None = None) -> Pass:
    """Replay the step with leaves as inputs, those of one ``(axis, position)`` changed.

    Raises
    ------
    SequenceProbeError
        If the model reads no sequence, or gives no output per position.
    """
    floats = [t for t in step.inputs() if t.is_floating_point() and t.ndim == 3][:1]
    instead = {id(leaf): leaf_of(leaf, changed) for leaf in floats}
    with _Inputs(changed) as seen:
        made = step.replay(instead)
    read = seen.read + [(leaf, None) for leaf in instead.values()]
    scores = [] if seen.scores is None else [seen.scores]
    for size in sorted({tuple(leaf.shape[:2]) for leaf, _ in read}, key=lambda shape: -shape[0] * shape[1]):
        for output in [*scores, *made[::-1]]:
            rows = _by_position(output, *size) if output.requires_grad else None
            if rows is not None:
                of_size = [(leaf, index) for leaf, index in read if tuple(leaf.shape[:2]) == size]
                indices = [index for _, index in of_size if index is not None]
                tokens = max(indices, key=lambda i: len(set(i.flatten().tolist()))) if indices else None
                targets = seen.targets if output is seen.scores else None
                return Pass(tuple(leaf for leaf, _ in of_size), tokens, rows, targets)
    if not read:
        raise SequenceProbeError("the model reads neither embeddings nor an input of three dimensions")
    shapes = " or ".join("x".join(map(str, leaf.shape[:2])) for leaf, _ in read[:2])
    raise SequenceProbeError(f"no output has one row for each of {shapes} positions")


def _by_position(output: Tensor, first: int, second: int) -> Tensor | None:
    """Return ``[A, B, V]``; a flat output may lack one position of each sample, as shifted scores do."""
    if output.ndim == 3 and tuple(output.shape[:2]) == (first, second):
        return output
    if output.ndim == 3 and (output.shape[0], output.shape[2]) == (first, second):
        return output.movedim(1, 2)  # classes second, as cross-entropy takes them
    if tuple(output.shape) == (first, second):
        return output[..., None]
    if output.ndim == 2 and output.shape[1] > 1:
        for a, b in ((first, second), (first, second - 1), (first - 1, second)):
            if output.shape[0] == a * b:
                return output.reshape(a, b, -1)
    return None


@dataclass(frozen=True)
class Sequences:
    """A pass, and the ``axis`` along which outputs change with the input at the first position."""

    whole: Pass
    axis: int
    last: int  # the last position that changes with the first

    @classmethod
    def of(cls, step: TapedStep) -> Sequences:
        """Replay the step, with and without changed inputs.

        Raises
        ------
        SequenceProbeError
            If no output depends on the input at another position.
        """
        rows = replayed(step).rows
        mixed = []
        for axis in (1, 0):
            if rows.shape[axis] > 1:
                differs = (replayed(step, (axis, 0)).rows != rows).movedim(axis, 0).flatten(1).any(1)
                positions = differs.nonzero().flatten().tolist()
                if positions and positions[-1] > 0:
                    mixed.append((axis, positions[-1]))
        if not mixed:
            raise SequenceProbeError("no output changes with the input at another position")
        # Last: a further pass would write running statistics, which the graph of this one holds.
        return cls(replayed(step), *mixed[0])


def probe_future(sequences: Sequences) -> ProbeResult:
    """Probe whether an output depends on the input at a later position."""
    whole, axis = sequences.whole, sequences.axis
    length = whole.rows.shape[axis]
    for end in sorted({1, length // 2, length - 1} - {0}):
        reached = whole.depends_on(axis, 0, end)
        later = reached[reached >= end]
        if len(later):
            span = f"{int(later[0])} to {int(later[-1])}" if len(later) > 1 else str(int(later[0]))
            text = f"the output up to position {end - 1} depends on the input at {span}: it sees the future"
            return ProbeResult(Probe.FUTURE, ProbeOutcome.FAILED, text)
    text = f"no output depends on a later input, of {length} positions"
    return ProbeResult(Probe.FUTURE, ProbeOutcome.PASSED, text)


def probe_targets(sequences: Sequences) -> ProbeResult:
    """Probe whether a target is an input that its output sees, or leaves out the next one."""
    whole, axis = sequences.whole, sequences.axis
    a, b = whole.rows.shape[:2]
    if whole.indices is None or whole.targets is None or whole.targets.numel() != a * b:
        text = "there are no tokens with one target each"
        return ProbeResult(Probe.TARGETS, ProbeOutcome.NOT_PROBED, text)
    tokens = whole.indices.movedim(axis, 0)
    targets = whole.targets.reshape(a, b).movedim(axis, 0)
    shares = {distance: _equal(tokens, targets, distance) for distance in DISTANCES}
    distance = next((d for d in DISTANCES if shares[d] >= EQUAL_SHARE), None)
    if distance is None:
        return ProbeResult(Probe.TARGETS, ProbeOutcome.PASSED, "the targets are none of the inputs nearby")
    if distance == 1:
        return ProbeResult(Probe.TARGETS, ProbeOutcome.PASSED, "each target is the next input")
    where = {0: "at their own position", -1: "at the position before"}.get(
        distance, f"{distance} positions on"
    )
    why = "which the output sees" if distance <= 0 else "not the next one: they are shifted twice"
    text = f"{shares[distance]:.0%} of the targets are the input {where}, {why}"
    return ProbeResult(Probe.TARGETS, ProbeOutcome.FAILED, text)


def _equal(tokens: Tensor, targets: Tensor, distance: int) -> float:
    """Return the share of targets that equal the token ``distance`` later, 0 without any."""
    begin, end = max(0, -distance), min(len(targets), len(tokens) - distance)
    if end <= begin:
        return 0.0
    here, there = targets[begin:end], tokens[begin + distance : end + distance]
    counted = here != IGNORED
    return float((here == there)[counted].float().mean()) if bool(counted.any()) else 0.0


def probe_through_time(seq: Sequences) -> ProbeResult:
    """Probe whether the gradient of an output reaches the earlier inputs that it depends on."""
    reached = seq.whole.depends_on(seq.axis, seq.last, seq.last + 1)
    earlier = reached[reached < seq.last]
    if len(earlier):
        text = f"the gradient at position {seq.last} reaches back to position {int(earlier[0])}"
        return ProbeResult(Probe.THROUGH_TIME, ProbeOutcome.PASSED, text)
    text = (
        f"the output at position {seq.last} changes with the input at position 0, and its gradient reaches "
        "no earlier position: the state is detached"
    )
    return ProbeResult(Probe.THROUGH_TIME, ProbeOutcome.FAILED, text)
