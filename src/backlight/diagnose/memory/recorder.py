"""Record training steps: every storage that an operation allocates, until it is freed, and what it computes.

A dispatch mode receives each operation below autograd, forward and backward, on real tensors and on fake
ones. What a kernel allocates and frees inside itself (a workspace) is not observable.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from backlight.capture.modules import table_of, walk
from backlight.diagnose.memory.result import Flops, LogitsMemory, MemoryKind, Storage, StorageLog
from backlight.interrupts import is_interrupt
from backlight.records import Phase

_READ_SCALAR = torch.ops.aten._local_scalar_dense.default


class NodeModules:
    """The modules whose forward is running, and the autograd nodes that each has created.

    Autograd numbers its nodes in the order of the forward: what is new as a module begins or ends belongs to
    the one that was running until then.
    """

    def __init__(self) -> None:
        self._running: list[str] = []
        self._starts: list[int] = []
        self._names: list[str] = []
        self._end = _next_node_number()

    @property
    def inside(self) -> bool:
        """Whether a module's forward is running."""
        return bool(self._running)

    def enter(self, name: str) -> None:
        """Begin the forward of a module."""
        self._note()
        self._running.append(name)

    def leave(self) -> None:
        """End the forward of the innermost module."""
        if self._running:
            self._note()
            self._running.pop()

    def current(self, *, backward: bool) -> str:
        """Return the module whose forward, or whose node of backward, is running."""
        if self._running:
            return self._running[-1]
        node: Any = torch._C._current_autograd_node() if backward else None
        number = -1 if node is None else node._sequence_nr()
        index = bisect.bisect_right(self._starts, number) - 1
        return self._names[index] if index >= 0 and number < self._end else ""

    def _note(self) -> None:
        number = _next_node_number()
        if number > self._end:
            self._starts.append(self._end)
            self._names.append(self._running[-1] if self._running else "")
            self._end = number


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


# What the recorded operations of a step compute: floating-point operations, workspaces, logits.


aten = torch.ops.aten

_WORKSPACE_OPERATIONS = frozenset({
    "convolution", "convolution_backward", "_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn",
    "miopen_rnn_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward",
    "mm", "bmm", "addmm", "baddbmm", "_scaled_mm",
})  # fmt: skip
"""Operations whose kernels (oneDNN, cuDNN, cuBLAS) may allocate a workspace."""

_TOO_LOW = {
    "rnn": "recurrent layers: 4 to 52 % too low for a CPU, whose kernel returns a workspace as well",
    "convolution": "convolutions: on a CPU 2 to 50 % of a small model's peak on top, most in bf16",
}
"""What predictions missed in bench/memory.py, by a part of the names of the operations."""


def underestimates(workspaces: Mapping[str, int]) -> tuple[str, ...]:
    """Return by how much predictions with these operations were too low; nothing where they agreed."""
    return tuple(text for part, text in _TOO_LOW.items() if any(part in name for name in workspaces))


class OperationCounter:
    """Counts what a step computes, and calls ``on_softmax`` with the input of each log-softmax."""

    def __init__(self) -> None:
        self._by_phase: Counter[str] = Counter()
        self._by_module: Counter[str] = Counter()
        self._workspaces: Counter[str] = Counter()
        self._recomputed = 0
        self.on_softmax: Callable[[torch.Tensor], None] | None = None

    def clear(self) -> None:
        """Count the next step."""
        self._by_phase.clear()
        self._by_module.clear()
        self._workspaces.clear()
        self._recomputed = 0

    def __call__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        phase: str,
        modules: NodeModules,
    ) -> None:
        """Count one operation of a phase."""
        packet = func._overloadpacket
        if packet is aten._log_softmax and self.on_softmax is not None:
            self.on_softmax(args[0])
        if packet.__name__ in _WORKSPACE_OPERATIONS:
            self._workspaces[packet.__name__] += 1
        formula = _FORMULAS.get(packet)
        if formula is None:
            return
        count = int(formula(*args, **kwargs, out_val=result))
        self._by_phase[phase] += count
        if phase == Phase.BACKWARD:
            self._recomputed += count if modules.inside else 0
            return
        name = modules.current(backward=False)
        while True:
            self._by_module[name] += count
            if not name:
                return
            name = name.rpartition(".")[0]

    def flops(self) -> Flops:
        """Return what was counted since the last :meth:`clear`."""
        return Flops(
            forward=self._by_phase[Phase.FORWARD] + self._by_phase[Phase.LOSS],
            backward=self._by_phase[Phase.BACKWARD],
            recomputed=self._recomputed,
            modules=dict(self._by_module),
        )

    def workspaces(self) -> dict[str, int]:
        """Return the calls of operations whose kernels may allocate a workspace, by operation."""
        return dict(self._workspaces.most_common())


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-any-return, no-untyped-call]  # torch's are untyped


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)  # type: ignore[no-any-return, no-untyped-call]  # torch's are untyped


# torch counts the attention of the CPU as 0. As everywhere, a causal mask is not subtracted.
_FORMULAS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class LogitsTracker:
    """Finds the largest tensor that a log-softmax reads while a recorder is active."""

    def __init__(self, recorder: MemoryRecorder) -> None:
        self._recorder = recorder
        self._shape: tuple[int, ...] = ()
        self._dtype = torch.float32
        self._index: int | None = None

    def on_softmax(self, tensor: torch.Tensor) -> None:
        """Keep the input of a log-softmax if it is the largest."""
        if not self._shape or tensor.numel() >= math.prod(self._shape):
            self._shape, self._dtype = tuple(tensor.shape), tensor.dtype
            self._index = self._recorder.index(tensor)

    def find(self, start: int = 0, granule: int = 1) -> LogitsMemory | None:
        """Return the logits of the steps from event ``start`` on; None without a log-softmax."""
        if not self._shape:
            return None
        log = self._recorder.log
        elements = math.prod(self._shape)
        module = log.storages[self._index].module if self._index is not None else ""
        # Allocated by the same module, or outside of all modules once the forward is over.
        same_size = {
            index
            for index, storage in enumerate(log.storages)
            if math.prod(storage.shape) == elements
            and (storage.module == module or not storage.module)
            and storage.phase in {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD}
        }
        live = most = count = copies = 0
        for event in log.events[start:]:
            index = abs(event) - 1
            if index in same_size:
                size = -(-log.storages[index].nbytes // granule) * granule
                live, count = (live + size, count + 1) if event > 0 else (live - size, count - 1)
                most, copies = max(most, live), max(copies, count - 1)
        return LogitsMemory(
            shape=self._shape,
            dtype=str(self._dtype).removeprefix("torch."),
            itemsize=self._dtype.itemsize,
            copies=copies,
            live_at_most=most,
        )
