"""Probes of the parts of a model: its inputs, frozen and trained weights, adapters, and the first loss."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from backlight.capture.batches import tensors_in
from backlight.capture.hub import HUB
from backlight.capture.optimizers import parameters_of
from backlight.diagnose.probes.result import Probe, ProbeOutcome, ProbeResult
from backlight.diagnose.probes.tape import TapedStep, TapeError, restored_state
from backlight.text import count, listed

MOST = 8
"""Inputs, and parts without a gradient, that are changed one after the other."""

IGNORED = 0.05
"""Share of the columns of an input, without effect, below which it is an edge, as that of a convolution."""

HIGH_LOSS = 2.0
"""Times the loss of a guess from which on the first loss is high."""

ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
"""Names of the parts of an adapter; those that end with B begin at zero."""


@dataclass(frozen=True)
class Part:
    """A parameter by its name, and whether an optimizer holds it; without any, each counts as held."""

    name: str
    parameter: nn.Parameter
    is_in_optimizer: bool


def parts_of(step: TapedStep) -> list[Part]:
    """Return the parameters of the modules of a step, each once; of several modules with their classes."""
    modules = step.modules()
    optimizers = HUB.optimizers.existing()
    optimized = {id(tensor) for optimizer in optimizers for tensor in parameters_of(optimizer)}
    parts: dict[int, Part] = {}
    for module in modules:
        prefix = f"{type(module).__name__}." if len(modules) > 1 else ""
        for name, parameter in module.named_parameters():
            is_in_optimizer = not optimizers or id(parameter) in optimized
            parts.setdefault(id(parameter), Part(f"{prefix}{name}", parameter, is_in_optimizer))
    return list(parts.values())


def _loss(step: TapedStep, instead: dict[int, Tensor] | None = None) -> float:
    return float(step.replay(instead)[-1].detach())


def _repeated_loss(step: TapedStep) -> float:
    """Return the loss of a replay.

    Raises
    ------
    TapeError
        If another replay computes another loss, so that nothing follows from a change.
    """
    loss = _loss(step)
    if _loss(step) != loss:
        raise TapeError("the loss is another one when it is computed again")
    return loss


def inputs_of(step: TapedStep) -> dict[str, Tensor]:
    """Return by name the tensors that modules are given from outside of the step, each once."""
    made = {id(tensor) for call in step.calls for tensor in tensors_in(call.result)}
    inputs: dict[int, tuple[str, Tensor]] = {}
    for call in step.calls:
        if not isinstance(call.function, nn.Module):
            continue
        names = list(inspect.signature(call.function.forward).parameters)
        names += [f"input {number}" for number in range(len(names), len(call.args))]
        for name, value in [*zip(names, call.args, strict=False), *call.kwargs.items()]:
            tensors = tensors_in(value)
            for number, tensor in enumerate(tensors):
                if id(tensor) not in made and not isinstance(tensor, nn.Parameter):
                    label = name if len(tensors) == 1 else f"{name}[{number}]"
                    inputs.setdefault(id(tensor), (f"`{label}` of {type(call.function).__name__}", tensor))
    return dict(inputs.values())


def _other(tensor: Tensor) -> Tensor | None:
    """Return other values of the same kind; None where there are none to take."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    if tensor.is_floating_point():
        if bool(((tensor >= 0) & (tensor <= 1) & (tensor != 0.5)).all()):
            return 1 - tensor  # as targets of binary cross-entropy, which takes no others
        spread = float(tensor.std()) if tensor.numel() > 1 else 0.0
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)
        return tensor + noise * (0.1 * spread if spread > 0 and math.isfinite(spread) else 0.1)
    rolled = tensor.roll(1, 0) if tensor.ndim else tensor
    return None if bool((rolled == tensor).all()) else rolled


def probe_inputs(step: TapedStep) -> list[ProbeResult]:
    """Probe whether the loss changes with each input; whole numbers may be meant for something else."""
    inputs = inputs_of(step)
    dead: list[str] = []
    unclear: list[str] = []
    probed: list[str] = []
    with restored_state(step.modules()):
        loss = _repeated_loss(step)
        for name, tensor in list(inputs.items())[:MOST]:
            changed = _other(tensor)
            if changed is None:
                continue
            probed.append(name)
            if _loss(step, {id(tensor): changed}) == loss:
                (dead if tensor.is_floating_point() else unclear).append(name)
    if dead or unclear:
        text = f"the loss is the same with other values of {listed([*dead, *unclear])}"
        outcome = ProbeOutcome.FAILED if dead else ProbeOutcome.UNDECIDED
        return [ProbeResult(Probe.INPUTS, outcome, text)]
    if not probed:
        return [ProbeResult(Probe.INPUTS, ProbeOutcome.NOT_PROBED, "no input of a module can be changed")]
    text = f"the loss changes with {listed(probed)}"
    if ignored := list(filter(None, (_ignored_columns(step, *item) for item in list(inputs.items())[:MOST]))):
        text = f"{text}, but with no value of {listed(ignored)}; right if they are meant for something else"
        return [ProbeResult(Probe.INPUTS, ProbeOutcome.UNDECIDED, text)]
    return [ProbeResult(Probe.INPUTS, ProbeOutcome.PASSED, text)]


def _ignored_columns(step: TapedStep, name: str, tensor: Tensor) -> str:
    """Return the columns of a table of numbers that the loss does not change with; empty without any.

    Their gradient is zero for every sample, and other values in them give the same loss.
    """
    is_table = tensor.ndim == 2 and tensor.is_floating_point() and tensor.layout is torch.strided
    if not is_table or min(tensor.shape) < 2:
        return ""
    leaf = tensor.detach().clone().requires_grad_()
    with restored_state(step.modules()):
        root = step.replay({id(tensor): leaf})[-1]
        (gradient,) = torch.autograd.grad(root, leaf, allow_unused=True)
        changed = _other(tensor.detach())
        if gradient is None or changed is None:
            return ""
        columns = gradient.eq(0).all(0)
        # A column whose values cannot be changed shows nothing.
        columns &= changed.ne(tensor).any(0)
        if columns.sum() < IGNORED * len(columns) or not columns.any() or columns.all():
            return ""
        if _loss(step, {id(tensor): torch.where(columns, changed, tensor.detach())}) != _repeated_loss(step):
            return ""
    numbers = columns.nonzero().flatten().tolist()
    is_range = numbers == list(range(numbers[0], numbers[-1] + 1))
    which = (
        f"{numbers[0]} to {numbers[-1]}" if is_range and len(numbers) > 1 else listed([*map(str, numbers)])
    )
    return f"columns {which} of the {tensor.shape[1]:,} of {name}"


class _Losses(TorchFunctionMode):
    """Notes the arguments of cross-entropy, of logits or log-probabilities, and of squared errors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, dict[str, Any], Any]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``."""
        result = func(*args, **(kwargs or {}))
        if func in {functional.cross_entropy, functional.nll_loss, functional.mse_loss}:
            arguments = dict(zip(("input", "target"), args, strict=False)) | (kwargs or {})
            self.calls.append((func, arguments, result))
        return result


def probe_first_loss(step: TapedStep) -> list[ProbeResult]:
    """Probe whether the first loss is about that of a guess: ln C, or the mean square of the targets."""
    with restored_state(step.modules()), _Losses() as losses:
        step.replay()
    comparable = [
        (func, arguments, result) for func, arguments, result in losses.calls
        if arguments.get("weight") is None and not arguments.get("label_smoothing") and result.numel() == 1
        and arguments.get("reduction", "mean") == "mean"
    ]  # fmt: skip
    if len(comparable) != 1:
        why = "several losses" if comparable else "the loss is neither cross-entropy nor a mean squared error"
        return [ProbeResult(Probe.FIRST_LOSS, ProbeOutcome.NOT_PROBED, why)]
    ((func, arguments, result),) = comparable
    loss = float(result.detach())
    if func is not functional.mse_loss:
        classes = arguments["input"].shape[1 if arguments["input"].ndim > 1 else 0]
        guess, what = math.log(classes), f"ln {classes:,}"
    else:
        target = arguments["target"].detach().double()
        guess, what = float(target.square().mean()), "the mean square of the targets"
    if not guess > 0 or not math.isfinite(loss):
        reason = f"the loss is {loss:.4g}, that of a guess {guess:.4g}"
        return [ProbeResult(Probe.FIRST_LOSS, ProbeOutcome.NOT_PROBED, reason)]
    numbers = f"the loss is {loss:.4g}, {what} is {guess:.4g}"
    if loss <= HIGH_LOSS * guess:
        return [ProbeResult(Probe.FIRST_LOSS, ProbeOutcome.PASSED, numbers)]
    text = f"{numbers}: the outputs begin far from a guess, by their scale or by wrong targets"
    return [ProbeResult(Probe.FIRST_LOSS, ProbeOutcome.UNDECIDED, text)]


def probe_frozen(step: TapedStep) -> list[ProbeResult]:
    """Probe whether frozen weights, and the statistics of frozen normalisations, stay as they are."""
    parts = parts_of(step)
    frozen = [part for part in parts if not part.parameter.requires_grad]
    if not frozen:
        return [ProbeResult(Probe.FROZEN, ProbeOutcome.NOT_PROBED, "no parameter is frozen")]
    norms = [
        (name, norm) for module in step.modules() for name, norm in module.named_modules()
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None
        and not any(p.requires_grad for p in norm.parameters())
        and any(True for _ in norm.parameters())
    ]  # fmt: skip
    before = [part.parameter.detach().clone() for part in frozen]
    with restored_state(step.modules()):
        means = [norm.running_mean.clone() for _, norm in norms if norm.running_mean is not None]
        step.replay()
        written = [
            part.name for part, copy in zip(frozen, before, strict=True)
            if not torch.equal(part.parameter.detach(), copy)
        ]  # fmt: skip
        moved = [
            name for (name, norm), mean in zip(norms, means, strict=True)
            if norm.running_mean is not None and not torch.equal(norm.running_mean, mean)
        ]  # fmt: skip
    left = [
        part.name for part in frozen
        if part.is_in_optimizer and HUB.optimizers.existing() and part.parameter.grad is not None
    ]  # fmt: skip
    amount = f"{len(frozen):,} of {count(len(parts), 'parameter')} are frozen"
    if written:
        text = f"{amount}, and the forward writes {listed(written)}"
        return [ProbeResult(Probe.FROZEN, ProbeOutcome.FAILED, text)]
    if left:
        text = f"{amount}, and an optimizer holds {listed(left)} with a gradient from before, which it uses"
        return [ProbeResult(Probe.FROZEN, ProbeOutcome.FAILED, text)]
    if moved:
        text = f"{amount}; the running statistics of {listed(moved)} move: it is in training mode"
        return [ProbeResult(Probe.FROZEN, ProbeOutcome.UNDECIDED, text)]
    return [ProbeResult(Probe.FROZEN, ProbeOutcome.PASSED, f"{amount}, and stay as they are")]


@contextlib.contextmanager
def _own_gradients(parts: Sequence[Part]) -> Iterator[None]:
    """Take gradients away, and put them back."""
    before = [part.parameter.grad for part in parts]
    for part in parts:
        part.parameter.grad = None
    try:
        yield
    finally:
        for part, grad in zip(parts, before, strict=True):
            part.parameter.grad = grad


def probe_gradients(step: TapedStep) -> list[ProbeResult]:
    """Probe whether a gradient reaches each trained parameter that the loss changes with."""
    parts = [each for each in parts_of(step) if each.parameter.requires_grad and each.is_in_optimizer]
    if not parts:
        reason = "no optimizer holds a parameter of the step"
        return [ProbeResult(Probe.GRADIENTS, ProbeOutcome.NOT_PROBED, reason)]
    with restored_state(step.modules()), _own_gradients(parts):
        torch.autograd.backward(step.replay()[-1])
        missing = [part for part in parts if part.parameter.grad is None]
        zero = sum(part.parameter.grad is not None and not bool(part.parameter.grad.any()) for part in parts)
    cut = _cut(step, missing) if missing else []
    reached = f"a gradient reaches {len(parts) - len(missing):,} of {count(len(parts), 'trained parameter')}"
    zeros = f", of {zero:,} it is zero" if zero else ""
    if cut:
        text = f"{reached}; the loss changes with {listed(cut)}, and no gradient comes back: it is cut"
        return [ProbeResult(Probe.GRADIENTS, ProbeOutcome.FAILED, text)]
    if missing:
        names = listed([part.name for part in missing])
        text = f"{reached}{zeros}; this loss does not use {names}"
        return [ProbeResult(Probe.GRADIENTS, ProbeOutcome.UNDECIDED, text)]
    return [ProbeResult(Probe.GRADIENTS, ProbeOutcome.PASSED, f"{reached}{zeros}")]


def _cut(step: TapedStep, missing: Sequence[Part]) -> list[str]:
    """Return the parameters without a gradient that the loss changes with."""
    changing = []
    with restored_state(step.modules()):
        loss = _repeated_loss(step)
        for part in missing[:MOST]:
            parameter = part.parameter.detach()
            before = parameter.clone()
            other = _other(before)
            if other is not None:
                parameter.copy_(other)
                if _loss(step) != loss:
                    changing.append(part.name)
                parameter.copy_(before)
    return changing


def probe_adapters(step: TapedStep) -> list[ProbeResult]:
    """Probe whether adapters (LoRA, by the names of their parts) are trained, and begin as they should."""
    parts = parts_of(step)
    adapters = [part for part in parts if any(word in ADAPTERS for word in part.name.split("."))]
    if not adapters:
        return [ProbeResult(Probe.ADAPTERS, ProbeOutcome.NOT_PROBED, "no adapter (lora_A, lora_B)")]
    problem = _adapter_problem(step, adapters)
    if problem:
        return [ProbeResult(Probe.ADAPTERS, ProbeOutcome.FAILED, problem)]
    trained = [part for part in adapters if part.parameter.requires_grad]
    base = sum(part.parameter.requires_grad for part in parts) - len(trained)
    seconds = [part for part in trained if _is_second(part)]
    zero = sum(not bool(part.parameter.any()) for part in seconds)
    start = f"{zero:,} of {len(seconds):,} lora_B are zero, as before training"
    text = f"{count(len(trained), 'adapter weight')} trained, {base:,} others; {start}"
    return [ProbeResult(Probe.ADAPTERS, ProbeOutcome.PASSED, text)]


def _is_second(part: Part) -> bool:
    return _is_second_name(part.name)


def _adapter_problem(step: TapedStep, adapters: Sequence[Part]) -> str:
    """Return why adapters cannot be trained; empty where they can."""
    merged = [
        name for module in step.modules() for name, layer in module.named_modules()
        if getattr(layer, "merged", False) is True and any(hasattr(layer, part) for part in ADAPTERS)
    ]  # fmt: skip
    if merged:
        return f"adapters are merged into {listed(merged)}: their own weights change no output"
    trained = [part for part in adapters if part.parameter.requires_grad]
    if not trained:
        return f"all {count(len(adapters), 'adapter weight')} are frozen; load them with is_trainable=True"
    outside = [part.name for part in trained if not part.is_in_optimizer]
    if outside:
        return f"{listed(outside)} {'is' if len(outside) == 1 else 'are'} in no optimizer"
    zero = [part.name for part in trained if not bool(part.parameter.any())]
    stuck = [name for name in zero if not _is_second_name(name) and name.replace("_A", "_B") in zero]
    if stuck:
        return f"{listed(stuck)} and the lora_B behind it are both zero: neither ever gets a gradient"
    with restored_state(step.modules()), _own_gradients(trained):
        torch.autograd.backward(step.replay()[-1])
        # Of an adapter whose B is zero, only B has a gradient at first.
        dead = [
            part.name for part in trained
            if _is_second(part) and (part.parameter.grad is None or not bool(part.parameter.grad.any()))
        ]  # fmt: skip
    if dead and len(dead) == sum(map(_is_second, trained)):
        return f"no gradient reaches {listed(dead)}"
    return ""


def _is_second_name(name: str) -> bool:
    return any(word.endswith("_B") for word in name.split("."))
