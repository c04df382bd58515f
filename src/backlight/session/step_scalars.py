"""Loss, learning rates and gradient norm of the script, of every step: collected on the training thread.

A value on the host is read at once. One on a device is copied there, into memory of its own, so that the
script may change it, and sent to the host when the writer thread asks or the memory is full: nothing waits.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from backlight import devices
from backlight.capture.parameters import PLAIN, settled
from backlight.capture.step_summary import ScalarSink
from backlight.capture.training_threads import count_modes, outside_modes
from backlight.interrupts import is_interrupt
from backlight.measure.transfer import AsyncCopy, start_copy

if TYPE_CHECKING:
    from backlight.session.step_recorder import StepRecord

MAX_QUEUED_STEPS = 1 << 20
"""Steps that may wait for a slow disk before further ones are dropped."""

CHUNK_VALUES = 256
"""Values on a device that are sent to the host together."""

MOST_TURNS = 16
"""Steps of a round of optimizers that step in turn, at most: the critic of a WGAN takes several of them."""

LEAP_STEPS = 16
"""A loss is compared with those of the last one to two times so many steps."""

LEAP_RATIO = 2.5
"""Factor by which a loss leaps above the highest of them; more than a loss scale that doubles."""


class DeviceValues:
    """Copies of numbers on one device, in chunks of memory that are used in turn."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._free: deque[Chunk] = deque()
        self._chunk: Chunk | None = None
        self.wanted = False

    def put(self, value: torch.Tensor) -> DeviceValue:
        """Copy a number, behind the work of the current stream, and return where it will arrive."""
        chunk = self._chunk
        if chunk is None:
            chunk = self._free.popleft() if self._free else Chunk(self._device, self._dtype, self._free)
            self._chunk = chunk
        index = chunk.used
        chunk.views[index].copy_(value)
        chunk.used = chunk.unread = index + 1
        if self.wanted or chunk.used == CHUNK_VALUES:
            self.send()
        return DeviceValue(chunk, index)

    def send(self) -> None:
        """Start the copy of what is there to the host."""
        self.wanted = False
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            chunk.copy = start_copy(chunk.values)


class Chunk:
    """Memory of :class:`DeviceValues`; it is free again when all of its values have been read."""

    def __init__(self, device: torch.device, dtype: torch.dtype, free: deque[Chunk]) -> None:
        with torch.inference_mode(False):  # else nothing could be written into it outside of that mode
            self.values = torch.zeros(CHUNK_VALUES, dtype=dtype, device=device)
        self.views = self.values.unbind()
        self.used = self.unread = 0
        self.copy: AsyncCopy | None = None
        self._free = free

    def take(self, index: int) -> float:
        """Return a value that has arrived; each is taken once."""
        assert self.copy is not None
        value = float(self.copy.read()[index])
        self.unread -= 1
        if not self.unread:
            self.copy, self.used = None, 0
            self._free.append(self)
        return value


class DeviceValue:
    """A number that is still on a device, or on its way."""

    __slots__ = ("_chunk", "_index", "_number")

    def __init__(self, chunk: Chunk, index: int) -> None:
        self._chunk: Chunk | None = chunk
        self._index = index
        self._number = 0.0

    def ready(self, *, wait: bool) -> bool:
        """Return whether it has arrived; with ``wait``, whether it is on its way."""
        chunk = self._chunk
        return chunk is None or (chunk.copy is not None and (wait or chunk.copy.done()))

    def read(self) -> float:
        """Return the number, on the thread that reads them all."""
        if self._chunk is not None:
            self._number, self._chunk = self._chunk.take(self._index), None
        return self._number


Value = float | complex | DeviceValue | None
"""A number, where it will arrive, or None where it could not be read."""


_Completed = tuple[
    int, tuple[Value, ...], tuple[Value, ...], tuple[tuple[int, tuple[Value, ...]], ...], "StepRecord | None",
    Mapping[int, Sequence[int]] | None,
]  # fmt: skip
"""Fields of a :class:`StepRow`. The garbage collector forgets plain tuples of numbers at its first look; the
steps of a second as objects are enough to make it go through everything, .2 s, some seconds later."""


class StepRow(NamedTuple):
    """Scalars of a completed step: ``losses`` and ``norms`` in their order, ``rates`` by optimizer.

    ``shares`` are the positions of the losses of each of several optimizers that stepped, where they are not
    those of all.
    """

    step: int
    losses: Sequence[Value]
    norms: Sequence[Value]
    rates: Sequence[tuple[int, Sequence[Value]]]
    record: StepRecord | None
    shares: Mapping[int, Sequence[int]] | None

    def ready(self, *, wait: bool) -> bool:
        """Return whether every value has arrived on the host; with ``wait``, whether it is on its way."""
        single = (*self.losses, *self.norms, *(rate for _, rates in self.rates for rate in rates))
        return all(value.ready(wait=wait) for value in single if type(value) is DeviceValue) and (
            wait or self.record is None or self.record.ready()
        )

    def scalars(self) -> dict[str, float]:
        """Return the scalars by name; each row is read once."""
        scalars: dict[str, float] = {}
        losses = [number for value in self.losses if (number := _number(value)) is not None]
        if losses and len(losses) == len(self.losses):
            scalars["loss"] = sum(losses)
            for number, share in (self.shares or {}).items():
                scalars[f"loss/{number}"] = sum(losses[position] for position in share)
        for index, value in enumerate(self.norms):
            norm = _number(value)
            if norm is not None:
                scalars[f"clip/norm/{index}" if index else "clip/norm"] = norm
        for optimizer, rates in self.rates:
            for group, value in enumerate(rates):
                rate = _number(value)
                if rate is not None:
                    scalars[f"lr/{optimizer}/{group}"] = rate
        return scalars


def _number(value: Value) -> float | None:
    if isinstance(value, DeviceValue):
        return value.read()
    return float(value.real) if isinstance(value, complex) else value


class StepScalars(ScalarSink):
    """Collects the scalars of the step in progress; ``queue`` holds those of completed steps.

    ``dropped`` counts steps that were dropped because the disk was too slow, ``last_norms`` are the total
    norms that the clippings of the last completed step used. ``turns`` is the steps of a round of optimizers
    that step in turn. ``on_leap`` is called with the step whose loss is not finite or leaps, on the training
    thread and before the next step opens; a loss on a device is unknown then.
    """

    def __init__(self) -> None:
        self.on_leap: Callable[[int], None] | None = None
        self.turns, self._round_began = 1, 0
        self._stepped_first = self._stepped_last = -1
        self._bound = self._highest = self._highest_before = math.inf
        self._probe: weakref.ref[torch.Tensor] | None = None
        self._losses: list[Value] = []
        self._earlier, self._reached = 0, False
        self._shares: dict[int, list[int]] | None = None
        self._norms: list[Value] = []
        self._clipped_by: list[torch.Tensor | None] = []
        self.last_norms: list[torch.Tensor | None] = []
        self._rates: list[tuple[int, tuple[Value, ...]]] = []
        self._devices: dict[tuple[torch.device, torch.dtype], DeviceValues] = {}
        self._kept_rates: dict[int, tuple[weakref.ref[torch.Tensor], int, Value]] = {}
        self.queue: deque[_Completed] = deque()
        self.dropped = 0

    @property
    def losses(self) -> int:
        """Number of losses of the step in progress."""
        return len(self._losses)

    def add_losses(self, roots: Sequence[torch.Tensor]) -> None:
        """Add the numbers from which a backward starts; other tensors are no losses."""
        if roots and self._losses and self._reached and not self._has_gradient():
            self._losses.clear()  # the gradients of those before were discarded
            self._shares = None
        self._earlier = len(self._losses)
        for root in roots:
            # The common case is here: each further call would cost as much as reading the number.
            if type(root) is torch.Tensor and root.is_cpu and root.numel() == 1 and not count_modes():
                try:
                    self._losses.append(root.item())
                except Exception as error:
                    if is_interrupt(error):
                        raise
                    self._losses.append(None)
            elif root.numel() == 1:  # else it is a part of a model, such as a stage of a pipeline
                self._losses.append(self._value(root))

    def after_backward(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        """Note whether that backward has left a gradient, which the next one may add to."""
        self._reached = self._has_gradient()
        if not self._reached:
            for parameter in parameters:
                if parameter.grad is not None:
                    self._probe, self._reached = weakref.ref(parameter), True
                    break

    def reached(self, optimizers: Mapping[int, bool]) -> None:
        """Note whose losses were added last; those before count where their gradients are still there."""
        added = range(self._earlier, len(self._losses))
        shares = self._shares = {} if self._shares is None else self._shares
        for number, adds in optimizers.items():
            shares[number] = [*(shares.get(number, ()) if adds else ()), *added]

    def _has_gradient(self) -> bool:
        parameter = None if self._probe is None else self._probe()
        return parameter is not None and parameter.grad is not None

    def drop_losses(self) -> None:
        """Forget the numbers that were added last: their backward failed."""
        del self._losses[self._earlier :]

    def add_norm(self, norm: torch.Tensor | None) -> None:
        """Add the total norm of a clipping; None where it has none."""
        self._norms.append(None if norm is None else self._value(norm))
        self._clipped_by.append(norm)

    def add_rates(self, number: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Add the learning rates of an optimizer that is about to step."""
        rates: list[Value] = []
        for group in groups:
            rate = group.get("lr")
            rates.append(rate if type(rate) is float else self._rate(group, rate))
        self._rates.append((number, tuple(rates)))

    def close(self, step: int, record: StepRecord | None = None) -> None:
        """Complete a step, with what else was recorded of it, and begin to collect those of the next."""
        if len(self.queue) < MAX_QUEUED_STEPS:
            shares = None if self._shares is None else self._shares_of_stepped(self._shares)
            losses, norms, rates = tuple(self._losses), tuple(self._norms), tuple(self._rates)
            self.queue.append((step, losses, norms, rates, record, shares))
        else:
            self.dropped += 1
        for loss in self._losses:
            if type(loss) is float:
                if not loss < self._bound and self.on_leap is not None:  # NaN as well
                    self.on_leap(step)
                self._highest = max(self._highest, loss)
        if not step % LEAP_STEPS:
            highest = max(self._highest, self._highest_before)
            self._bound = LEAP_RATIO * highest if highest > 0 else math.inf
            self._highest, self._highest_before = -math.inf, self._highest
        if self._rates and self._rates[0][0] != self._stepped_last:
            self._count_turns(step, self._rates[0][0])
        self._losses.clear()
        self._norms.clear()
        self._rates.clear()
        self._shares = None
        self.last_norms, self._clipped_by = self._clipped_by, []

    def _count_turns(self, step: int, number: int) -> None:
        """Note that another optimizer steps than before, and how long a round is once the first is back."""
        if self._stepped_last < 0:
            self._stepped_first = number
        elif number == self._stepped_first:
            steps, self._round_began = step - self._round_began, step
            self.turns = max(self.turns, steps if steps <= MOST_TURNS else 1)
        self._stepped_last = number

    def _shares_of_stepped(self, shares: Mapping[int, Sequence[int]]) -> Mapping[int, Sequence[int]]:
        """Return the losses of each optimizer that stepped; empty where several have the same ones."""
        stepped = {number for number, _ in self._rates}
        shares_of = {number: share for number in stepped if (share := shares.get(number, ()))}
        if len(stepped) == 1:  # whatever else a backward reached, it was for this one
            (number,) = stepped
            return shares_of or {number: range(len(self._losses))}
        return {} if len({tuple(share) for share in shares_of.values()}) < 2 else shares_of

    def take(self, *, wait: bool) -> StepRow | None:
        """Return the oldest completed step, None where there is none or its values have not arrived."""
        row = StepRow(*self.queue[0]) if self.queue else None
        if row is None or not row.ready(wait=wait):
            return None
        self.queue.popleft()
        return row

    def send(self) -> None:
        """Start the copy of what is on devices to the host; from the training thread."""
        for values in self._devices.values():
            values.send()

    def ask(self) -> None:
        """Request that the training thread sends what is on devices, with the next value; from any thread."""
        for values in list(self._devices.values()):
            values.wanted = True

    def _rate(self, group: Mapping[str, Any], rate: Any) -> Value:
        if not isinstance(rate, torch.Tensor):
            with contextlib.suppress(TypeError, ValueError):
                return None if rate is None else float(rate)
            return None
        if rate.is_cpu:
            return self._value(rate)
        # A rate on a device is copied where a schedule has changed it.
        kept, version, value = self._kept_rates.get(id(group), (None, -1, None))
        if kept is None or kept() is not rate or version != rate._version:
            value = self._value(rate)
            self._kept_rates[id(group)] = weakref.ref(rate), rate._version, value
        return value

    def _value(self, tensor: torch.Tensor) -> Value:
        """Return a number on the host, or where it will arrive; None where it cannot be read."""
        try:
            if type(tensor) not in PLAIN:
                part = settled(tensor)
                if part is None or type(part) not in PLAIN:
                    return None
                tensor = part
            with torch._C.DisableTorchFunction(), outside_modes():
                return self._read(tensor)
        except Exception as error:
            if is_interrupt(error):
                raise
            return None

    def _read(self, tensor: torch.Tensor) -> Value:
        if tensor.is_cpu:
            number: float | complex = tensor.item()
            return number
        if tensor.is_meta or not devices.is_accelerator(tensor.device) or devices.is_capturing_graph():
            return None
        dtype = torch.float64 if tensor.dtype in {torch.float64, torch.complex128} else torch.float32
        key = tensor.device, dtype
        values = self._devices.get(key)
        if values is None:
            values = self._devices[key] = DeviceValues(*key)
        tensor = tensor.detach().reshape(())
        return values.put(tensor.real if tensor.is_complex() else tensor)
