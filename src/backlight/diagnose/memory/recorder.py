"""Record the memory of training steps: every storage that an operation allocates, until it is freed.

A dispatch mode receives each operation below autograd, forward and backward, on real tensors and on fake
ones. What a kernel allocates and frees inside itself (a workspace) is not observable.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backlight.capture.modules import table_of, walk
from backlight.diagnose.memory.storage_log import MemoryKind, Storage, StorageLog
from backlight.interrupts import is_interrupt
from backlight.records import Phase

_READ_SCALAR = torch.ops.aten._local_scalar_dense.default


class NodeModules:
    """The modules whose forward is running, and the autograd nodes that each has created.

    Autograd numbers its nodes in the order of the forward, so that a module owns ranges of numbers.
    """

    def __init__(self) -> None:
        self._running: list[tuple[str, int]] = []
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, str]] = []

    @property
    def inside(self) -> bool:
        """Whether a module's forward is running."""
        return bool(self._running)

    def enter(self, name: str) -> None:
        """Begin the forward of a module."""
        self._running.append((name, _next_node_number()))

    def leave(self) -> None:
        """End the forward of the innermost module; it owns the nodes created since it began."""
        if self._running:
            name, begin = self._running.pop()
            self._add(begin, _next_node_number(), name)

    def current(self, *, backward: bool) -> str:
        """Return the module whose forward, or whose node of backward, is running."""
        if self._running:
            return self._running[-1][0]
        node: Any = torch._C._current_autograd_node() if backward else None
        if node is None:
            return ""
        number = node._sequence_nr()
        index = bisect.bisect_right(self._starts, number) - 1
        return self._ranges[index][2] if index >= 0 and number < self._ranges[index][1] else ""

    def _add(self, begin: int, end: int, name: str) -> None:
        # Inner modules return first and keep the numbers that they own; the outer one gets the gaps.
        owned = bisect.bisect_left(self._starts, begin)
        covered = begin
        gaps = []
        for start, stop, _ in self._ranges[owned:]:
            if covered < start:
                gaps.append((covered, start, name))
            covered = stop
        if covered < end:
            gaps.append((covered, end, name))
        for gap in gaps:
            index = bisect.bisect_left(self._starts, gap[0])
            self._starts.insert(index, gap[0])
            self._ranges.insert(index, gap)


def _next_node_number() -> int:
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # not in the stubs
    return number


OnOperation = Callable[[Any, tuple[Any, ...], dict[str, Any], Any, str, NodeModules], None]
"""Called with operation, arguments, keyword arguments, result, phase and the running modules."""


class MemoryRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """A dispatch mode that fills a :class:`StorageLog`; enter it for the steps to record.

    Memory is attributed to the modules of ``models``; tensors on other devices than ``device`` are ignored.
    ``on_operation`` is called after each operation. ``start`` is the number of events before the steps that
    count. ``trouble`` is why recording stopped, empty while it goes on; the operations themselves go on in
    any case.
    """

    def __init__(
        self, models: Iterable[nn.Module], on_operation: OnOperation | None = None, device: str = "cpu"
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = StorageLog()
        self.trouble = ""
        self.start = 0
        self.device = device
        self.phase: str = Phase.OTHER
        self._models = list(models)
        self._on_operation = on_operation
        self._indices: dict[int, int] = {}  # by the address of a live storage
        self._references: dict[int, weakref.ref[Any]] = {}
        self._modules = NodeModules()
        self._recomputed: list[int] = []
        self._handles: list[Any] = []

    def __enter__(self) -> MemoryRecorder:
        """Register what the models already hold, and begin to record."""
        hooked: set[int] = set()
        for model in self._models:
            for name, module in walk(model):
                self._register_module(name, module)
                if id(module) not in hooked:  # one that is used under two names has one forward
                    hooked.add(id(module))
                    self._handles.append(module.register_forward_pre_hook(partial(self._entered, name)))
                    self._handles.append(module.register_forward_hook(self._returned, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop recording; storages that are freed later stay live in the log."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._references.clear()
        self._indices.clear()

    def _register_module(self, name: str, module: nn.Module) -> None:
        for parameter in table_of(module, "_parameters").values():
            if parameter is not None:
                self._register(parameter, MemoryKind.PARAMETERS, name)
                if parameter.grad is not None:
                    self._register(parameter.grad, MemoryKind.GRADIENTS, name)
        for buffer in table_of(module, "_buffers").values():
            if buffer is not None:
                self._register(buffer, MemoryKind.BUFFERS, name)

    def begin_steps(self) -> None:
        """Count the steps from here on; what was registered before is allocated from their beginning."""
        self.start = len(self.log.events)

    def index(self, tensor: torch.Tensor) -> int | None:
        """Return the index of a tensor's storage in the log, None if it is not known."""
        return self._indices.get(tensor.untyped_storage()._cdata)

    def begin_phase(self, phase: Phase) -> None:
        """Begin a phase of the step.

        What data loading or the loop left is input when a forward begins; what a forward left is
        activations when backward begins; what backward left in ``.grad`` is gradients when it ends.
        """
        if phase is Phase.FORWARD:
            self._convert({Phase.DATA, Phase.OTHER, Phase.HOST_TO_DEVICE}, MemoryKind.INPUTS)
        elif phase is Phase.BACKWARD:
            self._convert({Phase.FORWARD, Phase.LOSS}, MemoryKind.ACTIVATIONS)
        if self.phase == Phase.BACKWARD and phase is not Phase.BACKWARD:
            self._register_gradients()
        self.phase = phase
        self.log.phases.append((len(self.log.events), phase))

    def _convert(self, phases: set[Phase], kind: MemoryKind) -> None:
        for index in self._indices.values():
            storage = self.log.storages[index]
            if storage.kind is MemoryKind.TEMPORARIES and storage.phase in phases:
                storage.kind = kind

    def register_inputs(self, batch: Any) -> None:
        """Register the tensors of a batch."""
        for tensor in tree_leaves(batch):
            if isinstance(tensor, torch.Tensor):
                self._register(tensor, MemoryKind.INPUTS, "")

    def register_held(self, tensors: Iterable[torch.Tensor]) -> None:
        """Register tensors that existed before and have no other kind."""
        for tensor in tensors:
            self._register(tensor, MemoryKind.HELD, "")

    def register_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the state of an optimizer, each tensor under the module of its parameter."""
        owners = {
            id(parameter): name
            for model in self._models
            for name, module in walk(model)
            for parameter in module.parameters(recurse=False)
        }
        for parameter, state in optimizer.state.items():
            for tensor in tree_leaves(dict(state) if isinstance(state, Mapping) else state):
                if isinstance(tensor, torch.Tensor):
                    self._register(tensor, MemoryKind.OPTIMIZER_STATE, owners.get(id(parameter), ""))

    def _register_gradients(self) -> None:
        for model in self._models:
            for name, module in walk(model):
                for parameter in module.parameters(recurse=False):
                    if parameter.grad is not None:
                        self._register(parameter.grad, MemoryKind.GRADIENTS, name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and log each unknown storage among arguments and results."""
        kwargs = kwargs or {}
        if self.phase == Phase.OPTIMIZER and func is _READ_SCALAR and isinstance(args[0], FakeTensor):
            return 1.0  # the count of steps, which AdamW reads for its bias correction
        result = func(*args, **kwargs)
        if not self.trouble:
            try:
                self._record(func, args, kwargs, result)
            except Exception as error:
                if is_interrupt(error):
                    raise
                self.trouble = f"recording stopped after {type(error).__name__}: {error}"
        return result

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        backward = self.phase == Phase.BACKWARD
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata in self._indices or not self._counts(tensor, storage):
                continue
            module = self._modules.current(backward=backward)
            index = self._allocate(tensor, storage, MemoryKind.TEMPORARIES, module, str(func))
            if backward and self._modules.inside:
                self._recomputed.append(index)
        for tensor in _tensors(args):
            if self.index(tensor) is None and tensor.device.type == self.device:
                # Allocated outside of torch's operations: by numpy, a worker process, a file.
                self._register(tensor, MemoryKind.INPUTS, "")
        if self._on_operation is not None:
            self._on_operation(func, args, kwargs, result, self.phase, self._modules)

    @contextlib.contextmanager
    def module(self, name: str) -> Iterator[None]:
        """Attribute what is allocated inside to a module whose forward runs without its hooks."""
        self._modules.enter(name)
        try:
            yield
        finally:
            self._returned()

    def _entered(self, name: str, _module: nn.Module, _args: Any) -> None:
        self._modules.enter(name)

    def _returned(self, *_: Any) -> None:
        """End the innermost module's forward; what a recomputed one left is activations."""
        self._modules.leave()
        if self._recomputed and not self._modules.inside:
            for index in set(self._recomputed).intersection(self._indices.values()):
                storage = self.log.storages[index]
                if storage.kind is MemoryKind.TEMPORARIES:
                    storage.kind = MemoryKind.ACTIVATIONS
            self._recomputed.clear()

    def _counts(self, tensor: torch.Tensor, storage: Any) -> bool:
        return bool(storage.nbytes()) and tensor.device.type == self.device

    def _register(self, tensor: torch.Tensor, kind: MemoryKind, module: str) -> None:
        for part in _strided_parts(tensor):
            storage = part.untyped_storage()
            index = self._indices.get(storage._cdata)
            if index is None:
                if self._counts(part, storage):
                    self._allocate(part, storage, kind, module, "")
                continue
            entry = self.log.storages[index]
            # The first claim stays: a gradient that is a view of a bucket belongs to the bucket.
            if entry.kind in {MemoryKind.TEMPORARIES, MemoryKind.ACTIVATIONS, MemoryKind.HELD}:
                entry.kind, entry.module = kind, module

    def _allocate(
        self, tensor: torch.Tensor, storage: Any, kind: MemoryKind, module: str, operation: str
    ) -> int:
        key = storage._cdata
        dtype = str(tensor.dtype).removeprefix("torch.")
        index = self.log.allocate(
            Storage(storage.nbytes(), kind, module, self.phase, operation, tuple(tensor.shape), dtype)
        )
        self._indices[key] = index

        def freed(_reference: Any) -> None:
            if self._references.pop(key, None) is not None:
                del self._indices[key]
                self.log.free(index)

        self._references[key] = weakref.ref(storage, freed)
        return index


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an operation's arguments or results, which nest in lists alone."""
    if isinstance(value, torch.Tensor):
        yield from _strided_parts(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _strided_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor, or the parts of one that has no storage of its own (sparse, DTensor)."""
    if tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout is torch.sparse_csr:
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _strided_parts(getattr(tensor, name))
