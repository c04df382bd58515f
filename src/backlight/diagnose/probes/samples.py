"""Probe of the samples of a batch: whether an output of one depends on the input of another.

The step is replayed with other contents of one sample. An operation all of whose inputs differ in that
sample alone, and whose result differs in others, is where the mixing begins.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from backlight.capture.batches import tensors_in
from backlight.capture.calls import ModuleCalls, module_names, operation_name, written_in_place
from backlight.diagnose.probes.result import Probe, ProbeOutcome, ProbeResult
from backlight.diagnose.probes.tape import TapedStep, restored_state
from backlight.user_code import SourceLine, user_line

LOSSES = (
    functional.cross_entropy, functional.nll_loss, functional.mse_loss, functional.l1_loss,
    functional.smooth_l1_loss, functional.huber_loss, functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
)  # fmt: skip

EQUAL = 1e-6
"""Differences up to this share of the largest value of a tensor do not count."""

MAX_BYTES = 4 * 2**30
"""Size of the results of one pass that are compared."""

_ALONG_AN_AXIS = frozenset({
    "view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "softmax", "log_softmax", "softmin",
    "lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention", "multi_head_attention_forward",
    "layer_norm", "rms_norm", "group_norm", "instance_norm", "normalize", "cumsum", "cumprod", "conv1d",
    "conv2d", "conv3d",
})  # fmt: skip
"""Operations that mix samples only where their axis is another one than meant."""

_STATISTICS = frozenset(
    {"mean", "var", "std", "var_mean", "std_mean", "sum", "norm", "amax", "amin", "max", "min"}
)
"""Operations by which a normalisation over the batch begins, which may be meant."""


class SampleProbeError(ValueError):
    """The step has no samples that can be told apart; the message says why."""


@dataclass(frozen=True)
class Mixing:
    """The operation at which the contents of one sample reach others."""

    operation: str
    module: str
    line: SourceLine | None

    def __str__(self) -> str:
        place = f" in {self.module}" if self.module else ""
        return f"`{self.operation}`{place}" + (f", {self.line}" if self.line else "")


def rows_of(changed: Tensor, sample: int, samples: int) -> bool:
    """Return whether ``changed`` is true only where one axis belongs to one sample.

    The axis has one index per sample, or a multiple, in blocks or interleaved.
    """
    for axis, size in enumerate(changed.shape):
        if size and size % samples == 0:
            others = [other for other in range(changed.ndim) if other != axis]
            index = (changed.any(dim=others) if others else changed).nonzero().flatten()
            block = size // samples
            if bool((index // block == sample).all()) or bool((index % samples == sample).all()):
                return True
    return False


def differing(old: Tensor, new: Tensor) -> Tensor | None:
    """Return where two tensors differ, of one shape; None where their shapes differ."""
    if old.shape != new.shape:
        return None
    if not old.is_floating_point():
        return old != new
    a, b = old.detach().double(), new.detach().double()
    scale = float(a.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if a.numel() else 0.0
    return ~torch.isclose(a, b, rtol=0.0, atol=EQUAL * scale, equal_nan=True)


class _Pass(TorchFunctionMode):
    """Keeps the result of each operation of a pass, or compares it with an earlier pass.

    Batch norm takes its statistics from the earlier pass: they are meant to depend on all samples.
    """

    def __init__(self, names: dict[int, str], base: _Pass | None, sample: int, samples: int) -> None:
        super().__init__()
        self.results: list[tuple[str, list[Tensor]]] = []
        self.statistics: list[tuple[Tensor, Tensor]] = []
        self.scores: list[Tensor] = []
        self.begins: list[Mixing] = []
        self._names, self._base, self._sample, self._samples = names, base, sample, samples
        self._spread: dict[int, Tensor] = {}
        self._calls = ModuleCalls()
        self._number = self._bytes = 0

    def __enter__(self) -> _Pass:
        """Follow the modules as well."""
        self._calls.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]  # torch's
        self._calls.__exit__()

    def has_spread(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the pass differs in other samples than the changed one."""
        return id(tensor) in self._spread

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, and keep or compare what it returns."""
        kwargs = kwargs or {}
        name = operation_name(func)
        if func in LOSSES:
            self.scores.append(kwargs["input"] if "input" in kwargs else args[0])
        # The inputs are looked at first: the operation may write one of them.
        inputs = tensors_in((args, kwargs)) if name else []
        is_from_spread = any(id(tensor) in self._spread for tensor in inputs)
        function = self._batch_norm if func is functional.batch_norm else func
        result = function(*args, **kwargs)
        if name:
            made = tensors_in(result) or written_in_place(name, inputs, kwargs)
            self._note(name, made, is_from_spread)
        return result

    def _batch_norm(
        self, input: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None,
        training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        if training:
            if self._base is None:
                over = [axis for axis in range(input.ndim) if axis != 1]
                values = input.detach().float()
                self.statistics.append((values.mean(over), values.var(over, correction=0)))
            else:
                self.statistics.append(self._base.statistics[len(self.statistics)])
            mean, var = self.statistics[-1]
        return functional.batch_norm(input, mean, var, weight, bias, False, momentum, eps)

    def _note(self, name: str, made: list[Tensor], is_from_spread: bool) -> None:
        if self._base is None:
            self._bytes += sum(tensor.nbytes for tensor in made)
            if self._bytes > MAX_BYTES:
                raise SampleProbeError(
                    f"a forward computes more than {MAX_BYTES >> 30} GiB; use a smaller batch"
                )
            self.results.append((name, [tensor.detach().clone() for tensor in made]))
            return
        before = self._base.results[self._number] if self._number < len(self._base.results) else ("", [])
        self._number += 1
        if before[0] != name or len(before[1]) != len(made):
            raise SampleProbeError("the operations of a forward depend on the contents of the batch")
        is_spread = False
        for old, new in zip(before[1], made, strict=True):
            changed = differing(old, new)
            if changed is not None and (not changed.any() or rows_of(changed, self._sample, self._samples)):
                self._spread.pop(id(new), None)
            else:
                self._spread[id(new)] = new
                is_spread = True
        if is_spread and not is_from_spread:
            module = self._calls.current()
            where = "" if module is None else f"`{self._names.get(id(module), '')}`"
            kind = "" if module is None else f" ({type(module).__name__})"
            # The frames of this mode and of torch below the script are skipped.
            self.begins.append(Mixing(name, where + kind, user_line(sys._getframe(2))))
        elif is_from_spread and not is_spread and made:
            self.begins.clear()  # what was spread, such as packed sequences, is sorted by sample again


@dataclass(frozen=True)
class _Samples:
    """The samples along one ``axis`` of the inputs, of which there are ``count``."""

    step: TapedStep
    axis: int
    count: int

    def inputs(self) -> list[Tensor]:
        """Return the tensors that modules are given and none of the calls has made."""
        made = {id(tensor) for call in self.step.calls for tensor in tensors_in(call.result)}
        modules = (call for call in self.step.calls if isinstance(call.function, nn.Module))
        arguments = [tensor for call in modules for tensor in tensors_in((call.args, call.kwargs))]
        return [
            tensor
            for tensor in {id(tensor): tensor for tensor in arguments}.values()
            if id(tensor) not in made and tensor.ndim > self.axis and tensor.shape[self.axis] == self.count
        ]

    def changed(self) -> tuple[dict[int, Tensor], int]:
        """Return the inputs with one sample that has the contents of another one, and its number.

        Raises
        ------
        SampleProbeError
            If all samples are equal.
        """
        inputs, sample = self.inputs(), self.count // 2
        for other in [*range(sample + 1, self.count), *range(sample)]:
            pairs = [(x.select(self.axis, sample), x.select(self.axis, other)) for x in inputs]
            if any(bool((a != b).any()) for a, b in pairs):
                break
        else:
            raise SampleProbeError("all samples of the batch are equal")
        replaced = {}
        for tensor in inputs:
            copy = tensor.detach().clone()
            copy.select(self.axis, sample).copy_(tensor.detach().select(self.axis, other))
            replaced[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
        return replaced, sample


@dataclass(frozen=True)
class _Spread:
    """The outputs of a pass with one changed sample: their shapes, and where they began to be mixed."""

    shapes: tuple[tuple[int, ...], ...]
    is_mixed: bool
    begins: tuple[Mixing, ...]
    pairs: bool
    uses_batch_norm: bool
    sample: int
    reached: int


def _outputs(step: TapedStep, made: Sequence[Tensor], scores: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs of loss functions, or what the last module with more than a number returned."""
    if scores:
        return [tensor for tensor in scores if tensor.ndim]
    outputs: list[Tensor] = []
    first = 0
    for call in step.calls:
        of_call = made[first : first + len(tensors_in(call.result))]
        first += len(of_call)
        if isinstance(call.function, nn.Module) and (rows := [t for t in of_call if t.ndim]):
            outputs = rows
    return outputs


def _run(samples: _Samples, names: dict[int, str]) -> _Spread:
    """Replay the step with and without another content of one sample, and compare all operations."""
    step = samples.step
    replaced, sample = samples.changed()

    def replay(base: _Pass | None, instead: dict[int, Tensor] | None) -> tuple[_Pass, list[Tensor]]:
        with restored_state(step.modules()), _Pass(names, base, sample, samples.count) as run:
            made = step.replay(instead)
        return run, _outputs(step, made, run.scores)

    base, before = replay(None, None)
    run, outputs = replay(base, replaced)
    mixed = [(old, new) for old, new in zip(before, outputs, strict=True) if run.has_spread(new)]
    if mixed and replay(base, None)[0].begins:
        raise SampleProbeError("two passes with equal inputs differ")
    reached, pairs = sample, bool(mixed)
    for old, new in mixed:
        where = differing(old, new)
        pairs = pairs and where is not None and _is_of_pairs(where, sample, samples.count)
        reached = _other(where, sample, samples.count) if where is not None else reached
    shapes = tuple(tuple(output.shape) for output in outputs)
    return _Spread(shapes, bool(mixed), tuple(run.begins), pairs, bool(base.statistics), sample, reached)


def _is_of_pairs(changed: Tensor, sample: int, samples: int) -> bool:
    """Return whether two axes are those of samples, and only pairs with the changed one differ."""
    axes = [axis for axis, size in enumerate(changed.shape) if size == samples]
    if len(axes) < 2:
        return False
    rest = changed.clone()
    for axis in axes:
        rest.select(axis, sample).zero_()
    return not bool(rest.any())


def _other(changed: Tensor, sample: int, samples: int) -> int:
    """Return another sample than the changed one whose output differs, by the first axis of samples."""
    for axis, size in enumerate(changed.shape):
        if size and size % samples == 0:
            others = [other for other in range(changed.ndim) if other != axis]
            index = (changed.any(dim=others) if others else changed).nonzero().flatten() // (size // samples)
            reached = [int(row) for row in index if int(row) != sample]
            if reached:
                return reached[0]
    return sample


def probe_samples(step: TapedStep, stacked: AbstractSet[int]) -> ProbeResult:
    """Probe whether an output of one sample depends on another sample.

    ``stacked`` are the numbers of samples that a loader has stacked along the first axis.

    Raises
    ------
    SampleProbeError
        If the step has no samples that can be told apart.
    """
    first = next((x for x in step.inputs() if x.ndim > (1 if x.is_floating_point() else 0)), None)
    if first is None or first.shape[0] < 2:
        raise SampleProbeError("the model is given no batch of two samples or more")
    names = module_names([("", module) for module in step.modules()])
    spread = {0: _run(_Samples(step, 0, first.shape[0]), names)}
    is_sequence = first.ndim == (3 if first.is_floating_point() else 2) and first.shape[1] > 1
    if is_sequence:
        spread[1] = _run(_Samples(step, 1, first.shape[1]), names)
    return _verdict(first, spread, stacked)


def _verdict(first: Tensor, spread: dict[int, _Spread], stacked: AbstractSet[int]) -> ProbeResult:
    """Return the outcome: which axis has the samples, and whether they are mixed."""
    count = first.shape[0]
    axis = 0
    if 1 in spread:
        # A row of output per index of one axis, and none per index of the other: these are the samples.
        rows = {shape[0] for shape in spread[0].shapes}
        of_axis = [all(size % first.shape[a] == 0 for size in rows) for a in (0, 1)]
        axis = 1 if of_axis == [False, True] else 0
        is_clear = of_axis[0] != of_axis[1] or count in stacked or spread[0].is_mixed == spread[1].is_mixed
        if spread[0].is_mixed and not is_clear:
            text = (
                f"each output depends on others along axis 0 of the input {list(first.shape)}, and on none "
                "along axis 1: right if axis 0 is the time; if it is the batch, samples are mixed "
                "(`batch_first`)"
            )
            return ProbeResult(Probe.SAMPLES, ProbeOutcome.UNDECIDED, text)
    result = spread[axis]
    samples = f"{first.shape[axis]} samples (axis {axis} of the input {list(first.shape)})"
    if not result.is_mixed:
        norm = ", but through the statistics of batch norm" if result.uses_batch_norm else ""
        text = f"no output depends on another of {samples}{norm}"
        return ProbeResult(Probe.SAMPLES, ProbeOutcome.PASSED, text)
    if result.pairs:
        text = f"each output compares two of {samples}, as contrastive losses do"
        return ProbeResult(Probe.SAMPLES, ProbeOutcome.PASSED, text)
    begin = result.begins[0] if result.begins else None
    text = (
        f"sample {result.reached} of the output depends on sample {result.sample} of the input, of {samples}"
    )
    text += "" if begin is None else f": mixed by {begin}"
    if begin is not None and begin.operation in _ALONG_AN_AXIS:
        return ProbeResult(Probe.SAMPLES, ProbeOutcome.FAILED, text)
    if begin is not None and begin.operation in _STATISTICS:
        text += "; right if these are statistics over the batch, as those of batch norm"
    else:
        text += "; right if the model is to relate samples, as those of graphs are"
    return ProbeResult(Probe.SAMPLES, ProbeOutcome.UNDECIDED, text)
