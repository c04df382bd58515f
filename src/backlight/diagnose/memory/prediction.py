"""Predict the memory and the operations of one training step on fake tensors."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from backlight.capture.modules import named_parameters
from backlight.diagnose.memory.cuda_rules import CudaRules
from backlight.diagnose.memory.fake_model import (
    as_fake,
    build_fake,
    checkpoint_modules,
    fake_mode,
    repeated_blocks,
)
from backlight.diagnose.memory.operations import LogitsTracker, OperationCounter, underestimates
from backlight.diagnose.memory.recorder import Recorder
from backlight.diagnose.memory.result import (
    GRANULE_BYTES,
    PredictedMemory,
    PredictionError,
    account_fields,
)
from backlight.diagnose.memory.storage_log import Account
from backlight.records import Phase

STEPS = 2
"""Steps to run: the first has no optimizer state before its update, later ones are like the second."""


def predict_step(
    build_model: Callable[[], nn.Module],
    batch: Callable[[], Any],
    loss: Callable[[nn.Module, Any], torch.Tensor],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None,
    *,
    checkpoint: Collection[str] = (),
    reentrant: bool = False,
    device: str = "cuda",
) -> PredictedMemory:
    """Run two steps of bound recipe functions on fake tensors; see :func:`.predictor.predict`."""
    begin = time.perf_counter()
    granule = GRANULE_BYTES if device == "cuda" else 1
    rules = CudaRules() if device == "cuda" else None
    mode = fake_mode()
    model, built = build_fake(build_model, mode)
    inputs = as_fake(batch(), mode)
    counter = OperationCounter()
    recorder = Recorder([model], counter)
    logits = LogitsTracker(recorder)
    counter.on_softmax = logits.on_softmax
    with mode:
        optimizer = None if build_optimizer is None else build_optimizer(model)
        blocks = repeated_blocks(model)
        checkpoint_modules(model, checkpoint, recorder.module, reentrant=reentrant)
        with rules or contextlib.nullcontext(), recorder, _forward_phases(model, recorder):
            recorder.register_inputs(inputs)
            for _ in range(STEPS):
                recorder.begin_steps()
                counter.clear()
                if rules is not None:
                    rules.attention.clear()
                _step(model, inputs, loss, optimizer, recorder)
    if recorder.trouble:
        raise PredictionError(f"the step could not be recorded: {recorder.trouble}")
    account = Account(recorder.log, recorder.start, granule)
    parameters = {id(n.parameter): n.parameter for n in named_parameters(model)}
    return PredictedMemory(
        **account_fields(account),
        peak_unrounded=Account(recorder.log, recorder.start).peak,
        parameters=sum(p.numel() for p in parameters.values()),
        trainable=sum(p.numel() for p in parameters.values() if p.requires_grad),
        flops=counter.flops(),
        logits=logits.find(recorder.start, granule),
        workspaces=counter.workspaces(),
        too_low=underestimates(counter.workspaces()),
        ddp_bucket_bytes=(0, account.new_gradients()),
        blocks=blocks,
        built=built,
        device=device,
        assumed=rules.assumed if rules is not None else (),
        seconds=time.perf_counter() - begin,
    )


def _step(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    recorder: Recorder,
) -> None:
    recorder.begin_phase(Phase.FORWARD)
    value = loss(model, batch)
    if not value.requires_grad:
        raise PredictionError(
            "loss returned a tensor that no parameter of the model leads to: expected one for backward; "
            "is the model frozen, or the loss detached?"
        )
    recorder.begin_phase(Phase.BACKWARD)
    value.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
    recorder.begin_phase(Phase.OPTIMIZER)
    if optimizer is not None:
        optimizer.step()
        recorder.register_optimizer(optimizer)
    recorder.begin_phase(Phase.OTHER)
    # The loss of a step lives until the next step has one, as in a loop that prints it.
    if optimizer is not None:
        optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = None


@contextlib.contextmanager
def _forward_phases(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Separate forward and loss at the outermost module; a recomputed forward stays in backward."""

    def begin(phase: Phase) -> None:
        if recorder.phase != Phase.BACKWARD:
            recorder.begin_phase(phase)

    handles = [
        model.register_forward_pre_hook(lambda *_: begin(Phase.FORWARD)),
        model.register_forward_hook(lambda *_: begin(Phase.LOSS)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def explain_error(error: Exception, files: Sequence[Path]) -> str | None:
    """Return why a step fails on fake tensors, with its line and the fix; None for any other error."""
    line = _source_line(error, files)
    if isinstance(error, DataDependentOutputException):
        if error.func is torch.ops.aten._local_scalar_dense.default:
            return (
                f"{line}: reads the value of a tensor (.item(), float(), bool() or an `if` on it), and fake "
                "tensors have none; keep the value in the tensor (torch.where, clamp), or take the branch "
                "by a setting"
            )
        return f"{line}: {error.func} depends on values, and fake tensors have none"
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"{line}: the shape of {error.func} depends on values (a boolean index, nonzero, unique), "
            "and fake tensors have none; use torch.where, masked_fill, ignore_index or a fixed count"
        )
    if isinstance(error, RuntimeError) and ".numpy()" in str(error):
        return f"{line}: turns a tensor into numpy, and fake tensors have no values; stay in torch"
    return None


def _source_line(error: Exception, files: Sequence[Path]) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    wanted = {str(path) for path in files} | {str(path.resolve()) for path in files}
    libraries = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
    chosen = [f for f in frames if f.filename in wanted] or [
        f for f in frames if not f.filename.startswith(libraries)
    ]
    if not chosen:
        return "the step"
    last = chosen[-1]
    return f"{Path(last.filename).name}, line {last.lineno} (`{last.line}`)"
