"""Predict the memory and the operations of one training step on fake tensors."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from backlight.capture.modules import named_parameters
from backlight.diagnose.memory.account import Account
from backlight.diagnose.memory.block_checkpointing import checkpointed, repeated_blocks
from backlight.diagnose.memory.fake_step import as_fake, build_fake, fake_mode
from backlight.diagnose.memory.flop_counter import Counter
from backlight.diagnose.memory.logits import LogitsSeen
from backlight.diagnose.memory.prediction_result import GRANULE, Prediction, PredictionError
from backlight.diagnose.memory.recorder import Recorder
from backlight.records import Phase

STEPS = 2
"""Steps that are run: the first has no optimizer state before its update, later ones are like the second."""


def predict_step(
    build_model: Callable[[], nn.Module],
    batch: Callable[[], Any],
    loss: Callable[[nn.Module, Any], torch.Tensor],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None,
    *,
    checkpoint: Collection[str] = (),
    reentrant: bool = False,
    granule: int = GRANULE,
) -> Prediction:
    """Run two steps on fake tensors and return what they would take.

    Parameters
    ----------
    build_model, batch, loss, build_optimizer:
        As a recipe has them, with their settings bound; without an optimizer there is no state and no update.
    checkpoint:
        Names of modules to compute again in backward.
    reentrant:
        The mode of ``torch.utils.checkpoint``.
    granule:
        Sizes are rounded up to a multiple of this.

    Raises
    ------
    PredictionError
        If a step reads a value, makes a shape that depends on values, or has no gradient.
    """
    begin = time.perf_counter()
    mode = fake_mode()
    model, built = build_fake(build_model, mode)
    given = as_fake(batch(), mode)
    counter = Counter()
    recorder = Recorder([model], counter)
    phases = _Phases(model, recorder)
    logits = LogitsSeen(recorder)
    counter.softmax = logits.see
    with mode:
        optimizer = None if build_optimizer is None else build_optimizer(model)
        blocks = repeated_blocks(model)
        checkpointed(model, checkpoint, recorder.inside, reentrant=reentrant)
        with recorder, phases:
            recorder.inputs(given)
            for _ in range(STEPS):
                recorder.begin_steps()
                counter.clear()
                _step(model, given, loss, optimizer, recorder)
    if recorder.trouble:
        raise PredictionError(f"the step could not be followed: {recorder.trouble}")
    account = Account(recorder.ledger, recorder.start, granule)
    parameters = {id(n.parameter): n.parameter for n in named_parameters(model)}
    return Prediction(
        peak=account.peak,
        exact=Account(recorder.ledger, recorder.start).peak,
        kinds=account.kinds(),
        phase=account.phase,
        begin=account.begin,
        parameters=sum(p.numel() for p in parameters.values()),
        trainable=sum(p.numel() for p in parameters.values() if p.requires_grad),
        flops=counter.flops(),
        logits=logits.found(recorder.start, granule),
        blocks=blocks,
        built=built,
        seconds=time.perf_counter() - begin,
        account=account,
    )


def _step(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    recorder: Recorder,
) -> None:
    recorder.phase(Phase.FORWARD)
    value = loss(model, batch)
    if not value.requires_grad:
        raise PredictionError(
            "loss returned a tensor that no parameter of the model leads to: expected one for backward; "
            "is the model frozen, or the loss detached?"
        )
    recorder.phase(Phase.BACKWARD)
    value.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
    recorder.phase(Phase.OPTIMIZER)
    if optimizer is not None:
        optimizer.step()
        recorder.optimizer(optimizer)
    recorder.phase(Phase.OTHER)
    # The loss of a step lives until the next has one, as in a loop that prints it.
    if optimizer is not None:
        optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = None


class _Phases:
    """Tells forward from loss at the outermost module."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self._model, self._recorder = model, recorder
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._handles = [
            self._model.register_forward_pre_hook(lambda *_: self._tell(Phase.FORWARD)),
            self._model.register_forward_hook(lambda *_: self._tell(Phase.LOSS)),
        ]

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _tell(self, phase: Phase) -> None:
        if self._recorder.current != Phase.BACKWARD:  # there a model is computed again
            self._recorder.phase(phase)


def explained(error: Exception, files: Sequence[Path]) -> str | None:
    """Return what a step on fake tensors tripped over, with the line and the way out; None if something else.

    Parameters
    ----------
    files:
        Where a line is looked for first: the recipe.
    """
    place = _place(error, files)
    if isinstance(error, DataDependentOutputException):
        if error.func is torch.ops.aten._local_scalar_dense.default:
            return (
                f"{place}: reads the value of a tensor (.item(), float(), bool() or an `if` on it), and fake "
                "tensors have none; keep the value in the tensor (torch.where, clamp), or take the branch "
                "by a setting"
            )
        return f"{place}: {error.func} depends on values, and fake tensors have none"
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"{place}: the shape of {error.func} depends on values (a boolean index, nonzero, unique), "
            "and fake tensors have none; use torch.where, masked_fill, ignore_index or a fixed count"
        )
    if isinstance(error, RuntimeError) and ".numpy()" in str(error):
        return f"{place}: turns a tensor into numpy, and fake tensors have no values; stay in torch"
    return None


def _place(error: Exception, files: Sequence[Path]) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    wanted = {str(path) for path in files} | {str(path.resolve()) for path in files}
    own = str(Path(torch.__file__).parent)
    here = str(Path(__file__).parents[2])
    chosen = [f for f in frames if f.filename in wanted] or [
        f for f in frames if not f.filename.startswith((own, here))
    ]
    if not chosen:
        return "the step"
    last = chosen[-1]
    return f"{Path(last.filename).name}, line {last.lineno} (`{last.line}`)"
