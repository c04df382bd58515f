"""Predict the memory and the operations of one training step on fake tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
import traceback
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from backlight.capture.modules import named_parameters, walk
from backlight.diagnose.memory.cuda_rules import CudaRules
from backlight.diagnose.memory.recorder import LogitsTracker, MemoryRecorder, OperationCounter, underestimates
from backlight.diagnose.memory.result import (
    GRANULE_BYTES,
    Account,
    Blocks,
    PredictedMemory,
    PredictionError,
    account_fields,
)
from backlight.records import Phase

Object = TypeVar("Object")

META, PIECEWISE, REAL = "meta", "piecewise", "real"


def fake_mode() -> FakeTensorMode:
    """Return the mode that every fake tensor of a prediction belongs to."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def as_fake(value: Object, mode: FakeTensorMode) -> Object:
    """Return a deep copy of any object with fake tensors in place of its tensors, ties and views kept."""
    with _FakeCopies(mode):
        return copy.deepcopy(value)


def build_fake(build: Callable[[], nn.Module], mode: FakeTensorMode) -> tuple[nn.Module, str]:
    """Return a fake model and how it was built; where ``build`` fails, it is retried with more memory."""
    try:
        with torch.device("meta"):
            model = build()
        return as_fake(model, mode), META
    except Exception:  # noqa: BLE001 - a constructor may fail on meta and work on real tensors
        pass
    try:
        return as_fake(_piecewise(build, mode), mode), PIECEWISE
    except Exception:  # noqa: BLE001 - the last build shows what is wrong with the recipe itself
        pass
    return as_fake(build(), mode), REAL


def _piecewise(build: Callable[[], nn.Module], mode: FakeTensorMode) -> nn.Module:
    def replace(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or isinstance(parameter, FakeTensor):
            return None
        replacement = made.get(id(parameter))
        if replacement is None:
            # The original is kept so that its id stays taken; its values are not.
            replacement = (as_fake(parameter, mode), parameter)
            made[id(parameter)] = replacement
            parameter.data = parameter.data.new_empty(0)
        return replacement[0]

    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    handle = register_module_parameter_registration_hook(replace)  # type: ignore[arg-type]  # may replace it, as torch documents
    try:
        return build()
    finally:
        handle.remove()


class _FakeCopies(TorchFunctionMode):
    """Makes a fake tensor of every tensor that is deep-copied."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._storages: dict[int, tuple[torch.Tensor, Any]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.clone:  # how a parameter copies its data
            return self._fake(args[0])
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor)
            return memo[id(tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(tensor, FakeTensor):
                return tensor
            if tensor.layout is not torch.strided:
                return self._mode.from_tensor(tensor, static_shapes=True)
            storage = tensor.untyped_storage()
            with self._mode:
                fake_storage = self._storages.get(storage._cdata)
                if fake_storage is None:
                    whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
                    fake_storage = self._storages[storage._cdata] = (whole, storage)
                base = (
                    fake_storage[0].view(tensor.dtype)
                    if fake_storage[0].numel()
                    else fake_storage[0].to(tensor.dtype)
                )
                made = base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
                # A view in autograd's eyes would not be a leaf.
                return made.detach().requires_grad_(tensor.requires_grad and tensor.is_leaf)


def repeated_blocks(model: nn.Module) -> tuple[Blocks, ...]:
    """Return groups of at least two siblings of one structure, the outermost only.

    A block has child modules and parameters; two have one structure if their modules have the same names
    and types, and their parameters the same shapes and types.
    """
    blocks: list[Blocks] = []
    inside: list[str] = []
    for name, module in walk(model):
        if any(name == block or name.startswith(f"{block}.") for block in inside):
            continue
        groups: dict[Hashable, list[tuple[str, nn.Module]]] = {}
        for key, child in module.named_children():
            if any(True for _ in child.children()) and any(True for _ in child.parameters()):
                full = f"{name}.{key}" if name else key
                groups.setdefault(_structure(child), []).append((full, child))
        for members in groups.values():
            if len(members) > 1:
                names = tuple(full for full, _ in members)
                blocks.append(Blocks(parent=name, type=type(members[0][1]).__name__, names=names))
                inside += names
    return tuple(blocks)


def checkpoint_modules(
    model: nn.Module,
    names: Collection[str],
    entered: Callable[[str], AbstractContextManager[None]],
    *,
    reentrant: bool = False,
) -> None:
    """Make the modules of these names recompute their forward in backward, in place.

    ``entered`` is called around each forward, also around a recomputed one, for which hooks do not run.
    """
    for name, module in walk(model):
        if name in names:
            module.forward = _checkpointed(name, module.forward, entered, reentrant=reentrant)


def _checkpointed(
    name: str,
    forward: Callable[..., Any],
    entered: Callable[[str], AbstractContextManager[None]],
    *,
    reentrant: bool,
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with entered(name):
            return forward(*args, **kwargs)

    return functools.partial(checkpoint, run, use_reentrant=reentrant)


def _structure(block: nn.Module) -> Hashable:
    return (
        tuple((name, type(module)) for name, module in block.named_modules()),
        tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters()),
    )


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
    recorder = MemoryRecorder([model], counter)
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
    recorder: MemoryRecorder,
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
def _forward_phases(model: nn.Module, recorder: MemoryRecorder) -> Iterator[None]:
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
