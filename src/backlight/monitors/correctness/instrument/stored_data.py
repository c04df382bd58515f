"""Whether reading a data set changes what it stores, so that each epoch gets other samples."""

from __future__ import annotations

import dis
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset

from backlight.capture.batches import indices_of, leaves
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.worker_seeds import reachable_methods
from backlight.monitors.correctness.rules import repeated_data as facts
from backlight.user_code import definition

EPOCHS = 3
"""Epochs whose stored samples are compared: one change may fill a cache."""

ROWS = 32
"""Samples of a data set that are compared, at least where it has as many, evenly over it."""

MIN_ROWS = 6
"""Fewest of them that no first batch of an epoch has read."""

VALUES = 16
"""Values of each that are compared."""

MAX_FIELDS = 4
"""Attributes of a data set that are compared."""

DEVIATION = 1e-3
"""Deviation from a linear function of the value before, as a share of the range, up to which it is one."""

Values = NDArray[np.float64]


@dataclass
class _Stored:
    """What a data set stored at the start of each epoch: by attribute, ``[rows, values]``."""

    rows: Sequence[int]
    epochs: list[dict[str, Values]] = field(default_factory=list)
    unread: set[int] = field(default_factory=set)


class StoredData(Check):
    """``repeated_data``: each epoch, the stored samples are the same linear function of what they were.

    Only where the code that reads a sample has an operation in place, the batches are what is stored, and the
    process that trains reads the data: workers change copies of their own.
    """

    name = "stored_data"
    steps = "all"

    def _start(self) -> None:
        self._stored: weakref.WeakKeyDictionary[Any, _Stored] = weakref.WeakKeyDictionary()

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Read some stored samples at the first batch of an epoch."""
        if index or getattr(iterator, "_num_workers", 0):
            return
        data: Any = getattr(iterator, "_dataset", None)
        indices = indices_of(iterator, 0)
        while isinstance(data, Subset) and indices is not None:
            indices = [int(data.indices[i]) for i in indices]
            data = data.dataset
        if indices is None or type(data).__module__.partition(".")[0] == "torch":
            return
        try:
            stored, size = self._stored.get(data), len(data)
        except (TypeError, NotImplementedError):  # no weak reference, or a stream
            return
        if stored is None:
            rows = range(0, size, max(size // ROWS, 1)) if writes_in_place(data) else ()
            stored = self._stored[data] = _Stored(rows, unread=set(rows))
        if not stored.rows or len(stored.epochs) == EPOCHS:
            return
        stored.unread -= set(indices)
        fields = dict(list(fields_of(data, size))[:MAX_FIELDS])
        stored.epochs.append({name: _values(values, stored.rows) for name, values in fields.items()})
        if len(stored.epochs) == EPOCHS and len(stored.unread) >= MIN_ROWS:
            self._compare(data, stored, batch, indices[0], fields)

    def _compare(self, data: Any, stored: _Stored, batch: Any, index: int, fields: dict[str, Any]) -> None:
        unread = [number for number, row in enumerate(stored.rows) if row in stored.unread]
        for name, values in fields.items():
            epochs = [epoch[name][unread] for epoch in stored.epochs if name in epoch]
            if len(epochs) == EPOCHS and is_iterated(*epochs) and _holds(batch, values[index]):
                line = str(definition(type(data).__getitem__) or "")
                kind = type(data).__name__
                self.report(facts.ChangedByReading(self.step, kind, name, *_means(epochs), line))
                return


def writes_in_place(data: Any) -> bool:
    """Return whether the code that reads a sample has an operation in place."""
    steps = [
        step
        for method in reachable_methods(type(data), "__getitem__")
        for step in dis.get_instructions(method)
    ]
    return any(
        (step.opname in {"BINARY_OP", "BINARY_OPERATION"} and step.argrepr.endswith("="))
        or step.opname.startswith("INPLACE_")
        or step.opname == "STORE_SUBSCR"
        or (step.opname.startswith("LOAD_") and _is_in_place(str(step.argval)))
        for step in steps
    )


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and len(name) > 1


def fields_of(data: Any, size: int) -> Iterator[tuple[str, Any]]:
    """Yield the attributes with an array of floating point numbers per sample, or one for all samples."""
    for name, value in getattr(data, "__dict__", {}).items():
        if type(value) not in {torch.Tensor, np.ndarray, list} or len(value) != size or not size:
            continue
        first = value[0]
        is_array = type(first) in {torch.Tensor, np.ndarray} and len(first.shape) and 0 not in first.shape
        if is_array and "float" in str(first.dtype) and str(getattr(first, "device", "cpu")) == "cpu":
            yield name, value


def _values(stored: Any, rows: Sequence[int]) -> Values:
    arrays = [np.asarray(stored[row], dtype=np.float64).reshape(-1) for row in rows]
    size = min(map(len, arrays))
    return np.array([array[:size][:: max(size // VALUES, 1)][:VALUES] for array in arrays])


def is_iterated(first: Values, second: Values, third: Values) -> bool:
    """Return whether ``third`` is the linear function of ``second`` that ``second`` is of ``first``.

    They are ``[rows, values]``; each column has a function of its own. All rows change both times.
    """
    if first.shape != second.shape or second.shape != third.shape:
        return False
    if not all(np.isfinite(values).all() for values in (first, second, third)):
        return False
    if not ((first != second).any(axis=1).all() and (second != third).any(axis=1).all()):
        return False
    fitted = 0
    for a, b, c in zip(first.T, second.T, third.T, strict=True):
        if np.ptp(a) <= 1e-6 * np.abs(a).max():
            continue
        slope, offset = np.polyfit(a, b, 1)
        error = np.abs(slope * a + offset - b).max(), np.abs(slope * b + offset - c).max()
        allowed = [DEVIATION * np.ptp(v) + 1e-6 * np.abs(v).max() for v in (b, c)]
        if error[0] > allowed[0] or error[1] > allowed[1]:
            return False
        fitted += 1
    return fitted > 0


def _holds(batch: Any, stored: Any) -> bool:
    """Return whether the first sample of a batch is what is stored of it."""
    sample = np.asarray(stored)
    return any(
        len(x) and tuple(x[0].shape) == sample.shape and np.array_equal(np.asarray(x[0]), sample)
        for x in leaves(batch, torch.Tensor)
        if x.ndim and x.device.type == "cpu"
    )


def _means(epochs: Sequence[Values]) -> tuple[float, float]:
    return float(epochs[0].mean()), float(epochs[-1].mean())
