"""Record the memory of training steps: every storage that an operation makes, from birth to end.

A dispatch mode sees each operation below autograd, forward and backward, on real tensors and on fake
ones. What a kernel allocates and frees inside itself (a vendor's workspace) is not seen.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backlight.capture.modules import walk
from backlight.diagnose.memory.node_modules import Modules
from backlight.diagnose.memory.storage_log import Kind, Ledger, Storage
from backlight.records import Phase

Seen = Callable[[Any, tuple[Any, ...], dict[str, Any], Any, str, Modules], None]
"""Called with operation, arguments, result, phase and the modules under way."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """A dispatch mode that fills a ledger; enter it for the steps to record.

    Parameters
    ----------
    models:
        Models whose modules memory is attributed to.
    seen:
        Called after each operation.
    device:
        Type of the device whose memory counts; tensors elsewhere are passed over.

    Attributes
    ----------
    ledger:
        What has come and gone so far.
    start:
        Number of events before the steps that count.
    trouble:
        Why recording stopped, empty while it goes on; the operations themselves go on in any case.
    """

    def __init__(self, models: Iterable[nn.Module], seen: Seen | None = None, device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()
        self.trouble = ""
        self.start = 0
        self.device = device
        self._models = list(models)
        self._seen = seen
        self._known: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._phase: str = Phase.OTHER
        self._modules = Modules()
        self._again: list[int] = []
        self._handles: list[Any] = []

    # Life

    def __enter__(self) -> Recorder:
        """Enter what the models already hold, and begin to record."""
        for model in self._models:
            self._hold_model(model)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop recording; storages that end later are not entered."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._forget()

    def _forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._references.clear()
        self._known.clear()

    def _hold_model(self, model: nn.Module) -> None:
        hooked: set[int] = set()
        for name, module in walk(model):
            for parameter in (vars(module).get("_parameters") or {}).values():
                if parameter is not None:
                    self._hold(parameter, Kind.PARAMETERS, name)
                    if parameter.grad is not None:
                        self._hold(parameter.grad, Kind.GRADIENTS, name)
            for buffer in (vars(module).get("_buffers") or {}).values():
                if buffer is not None:
                    self._hold(buffer, Kind.BUFFERS, name)
            if id(module) not in hooked:  # one that is used under two names has one forward
                hooked.add(id(module))
                self._handles.append(module.register_forward_pre_hook(_Entered(self, name)))
                self._handles.append(module.register_forward_hook(_Returned(self), always_call=True))

    def begin_steps(self) -> None:
        """What comes from now on counts; what was entered before it is there from the beginning."""
        self.start = len(self.ledger.events)

    @property
    def current(self) -> str:
        """The phase of the step."""
        return self._phase

    def index(self, tensor: torch.Tensor) -> int | None:
        """Return the index of a tensor's storage in the ledger, None if it is not known."""
        return self._known.get(tensor.untyped_storage()._cdata)

    # What the loop tells

    def phase(self, phase: Phase) -> None:
        """A phase of the step begins.

        What data loading or the loop left is input when a forward begins; what a forward left is
        activations when backward begins; what backward left in ``.grad`` is gradients when it ends.
        """
        if phase is Phase.FORWARD:
            self._turn({Phase.DATA, Phase.OTHER, Phase.HOST_TO_DEVICE}, Kind.INPUTS)
        elif phase is Phase.BACKWARD:
            self._turn({Phase.FORWARD, Phase.LOSS}, Kind.ACTIVATIONS)
        if self._phase == Phase.BACKWARD and phase is not Phase.BACKWARD:
            self._name_gradients()
        self._phase = phase
        self.ledger.phases.append((len(self.ledger.events), phase))

    def _turn(self, phases: set[Phase], kind: Kind) -> None:
        for index in self._known.values():
            storage = self.ledger.storages[index]
            if storage.kind is Kind.TEMPORARIES and storage.phase in phases:
                storage.kind = kind

    def inputs(self, batch: Any) -> None:
        """Enter the tensors of a batch."""
        for tensor in tree_leaves(batch):
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor, Kind.INPUTS, "")

    def held(self, tensors: Iterable[torch.Tensor]) -> None:
        """Enter tensors that were there before and are none of the above."""
        for tensor in tensors:
            self._hold(tensor, Kind.HELD, "")

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Name the state of an optimizer, each tensor under the module of its parameter."""
        owners = {
            id(p): name
            for model in self._models
            for name, m in walk(model)
            for p in m.parameters(recurse=False)
        }
        for parameter, state in optimizer.state.items():
            for tensor in tree_leaves(dict(state) if isinstance(state, Mapping) else state):
                if isinstance(tensor, torch.Tensor):
                    self._hold(tensor, Kind.OPTIMIZER_STATE, owners.get(id(parameter), ""))

    def _name_gradients(self) -> None:
        for model in self._models:
            for name, module in walk(model):
                for parameter in module.parameters(recurse=False):
                    if parameter.grad is not None:
                        self._hold(parameter.grad, Kind.GRADIENTS, name)

    # What happens

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and enter each storage among arguments and results that is not known."""
        kwargs = kwargs or {}
        if self._phase == Phase.OPTIMIZER and func is _READ and isinstance(args[0], FakeTensor):
            return 1.0  # the count of steps, which AdamW reads for its bias correction
        result = func(*args, **kwargs)
        if not self.trouble:
            try:
                self._look(func, args, kwargs, result)
            except Exception as error:  # noqa: BLE001 - never break the user's training
                self.trouble = f"recording stopped after {type(error).__name__}: {error}"
        return result

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for tensor in _tensors(result):
            self._meet(tensor, func)
        for tensor in _tensors(args):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and tensor.device.type == self.device:
                # Came from outside torch's operations: numpy, a worker process, a file.
                self._hold(tensor, Kind.INPUTS, "")
        if self._seen is not None:
            self._seen(func, args, kwargs, result, self._phase, self._modules)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """A module's forward, told by hand where no hook of the module sees it."""
        self.enter_module(name)
        try:
            yield
        finally:
            self.leave_module()

    def enter_module(self, name: str) -> None:
        """A module's forward begins."""
        self._modules.enter(name)

    def leave_module(self) -> None:
        """The innermost module's forward is over; what a recomputed one left is activations."""
        self._modules.leave()
        if self._again and not self._modules.inside:
            for index in set(self._again).intersection(self._known.values()):
                storage = self.ledger.storages[index]
                if storage.kind is Kind.TEMPORARIES:
                    storage.kind = Kind.ACTIVATIONS
            self._again.clear()

    def _meet(self, tensor: torch.Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known or tensor.device.type != self.device or not storage.nbytes():
            return
        backward = self._phase == Phase.BACKWARD
        index = self._enter(
            tensor, storage, Kind.TEMPORARIES, self._modules.current(backward=backward), str(func)
        )
        if backward and self._modules.inside:
            self._again.append(index)

    def _hold(self, tensor: torch.Tensor, kind: Kind, module: str) -> None:
        for part in _plain(tensor):
            storage = part.untyped_storage()
            index = self._known.get(storage._cdata)
            if index is None:
                if storage.nbytes() and part.device.type == self.device:
                    self._enter(part, storage, kind, module, "")
                continue
            known = self.ledger.storages[index]
            # The first claim stays: a gradient that is a view of a bucket is the bucket's.
            if known.kind in {Kind.TEMPORARIES, Kind.ACTIVATIONS, Kind.HELD}:
                known.kind, known.module = kind, module

    def _enter(self, tensor: torch.Tensor, storage: Any, kind: Kind, module: str, operation: str) -> int:
        key = storage._cdata
        index = self.ledger.came(
            Storage(
                storage.nbytes(),
                kind,
                module,
                self._phase,
                operation,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
            )
        )
        self._known[key] = index

        def gone(_reference: Any) -> None:
            if self._references.pop(key, None) is not None:
                del self._known[key]
                self.ledger.went(index)

        self._references[key] = weakref.ref(storage, gone)
        return index


class _Entered:
    """Hook before a module's forward."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        self._recorder.enter_module(self._name)


class _Returned:
    """Hook after a module's forward."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __call__(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._recorder.leave_module()


_READ = torch.ops.aten._local_scalar_dense.default


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an operation's arguments or results, which nest in lists alone."""
    if isinstance(value, torch.Tensor):
        yield from _plain(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor, or the parts of one that has no storage of its own (sparse, DTensor)."""
    if tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
    elif tensor.layout in {torch.sparse_coo, torch.sparse_csr}:
        if tensor.layout is torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())
        else:
            yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
