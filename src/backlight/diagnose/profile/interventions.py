"""Controls: one thing of a training is changed from outside, so that a suspicion can be tested.

A control changes what is computed or learned; it runs in a process of its own that is thrown away. In
the run that it is compared with, the same hooks stand and let everything pass.
"""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils.data import dataloader

from backlight.capture.hooks import Patches

CACHED_BATCH = "cached batch"
ONE_THREAD = "one thread"
NO_CLIPPING = "no clipping"
FUSED_OPTIMIZER = "fused optimizer"
WITHOUT_LINE = "without the copy"

_COPIES = frozenset({
    "clone", "contiguous", "to", "float", "double", "half", "bfloat16", "type", "type_as", "to_dense",
})  # fmt: skip


class Control(AbstractContextManager["Control"]):
    """Injects one control into a script that runs inside it.

    Parameters
    ----------
    name:
        One of the names above.
    line:
        File and line of what is left out, as ``path:number``, for :data:`WITHOUT_LINE`.
    on:
        False to stand by without a change.

    Raises
    ------
    ValueError
        If there is no control of that name.
    """

    def __init__(self, name: str, line: str = "", *, on: bool = True) -> None:
        self._on = on
        self._line = line
        self._patches = Patches()
        self._mode: _Without | None = None
        starts = {
            CACHED_BATCH: self._cache_batches,
            ONE_THREAD: self._one_thread,
            NO_CLIPPING: self._no_clipping,
            FUSED_OPTIMIZER: self._fuse,
            WITHOUT_LINE: self._without,
        }
        if name not in starts:
            raise ValueError(f"no control is called {name!r}; expected one of: {', '.join(starts)}")
        self._start = starts[name]

    def __enter__(self) -> Control:
        """Inject."""
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take it off."""
        self._patches.undo()
        if self._mode is not None:
            self._mode.on = False

    def _cache_batches(self) -> None:
        """Give the first batch of each data set again and again, as many times as the loader has batches."""
        kept: dict[int, Any] = {}
        given: dict[int, int] = {}

        def wrap(original: Any) -> Any:
            @functools.wraps(original)
            def __next__(iterator: Any) -> Any:  # noqa: N807
                source = id(getattr(iterator, "_dataset", None))
                if not self._on or source not in kept:
                    kept[source] = item = original(iterator)
                    return item
                given[id(iterator)] = given.get(id(iterator), 0) + 1
                try:
                    length = len(iterator)
                except TypeError:
                    length = sys.maxsize  # an iterable data set does not say
                if given[id(iterator)] > length:
                    del given[id(iterator)]
                    raise StopIteration
                return kept[source]

            return __next__

        self._patches.replace(dataloader._BaseDataLoaderIter, "__next__", wrap)

    def _one_thread(self) -> None:
        if self._on:
            torch.set_num_threads(1)
            self._patches.replace(torch, "set_num_threads", lambda _original: lambda _count: None)

    def _no_clipping(self) -> None:
        if not self._on:
            return
        nothing = torch.zeros(())
        self._patches.replace(clip_grad, "_get_total_norm", lambda _original: lambda *_args, **_more: nothing)
        self._patches.replace(
            clip_grad, "_clip_grads_with_norm_", lambda _original: lambda *_args, **_more: None
        )

    def _fuse(self) -> None:
        def wrap(original: Any) -> Any:
            @functools.wraps(original)
            def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
                if not self._on:
                    original(optimizer, *args, **kwargs)
                    return
                more = {**kwargs, "fused": True, "foreach": None}
                try:
                    original(optimizer, *args, **more)
                except RuntimeError:  # not for these types or this device
                    original(optimizer, *args, **kwargs)

            return __init__

        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
            if "__init__" in vars(kind):
                self._patches.replace(kind, "__init__", wrap)

    def _without(self) -> None:
        self._mode = _Without(self._line, on=self._on)
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # as torch has it


class _Without(TorchFunctionMode):
    """Returns what a copy on one line would have copied."""

    def __init__(self, line: str, *, on: bool) -> None:
        super().__init__()
        file, _, number = line.rpartition(":")
        self._file, self._number = file, int(number)
        self.on = on

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and getattr(func, "__name__", "") in _COPIES:
            frame = sys._getframe(1)
            here = frame.f_lineno == self._number and frame.f_code.co_filename == self._file
            if here and self.on:
                return args[0]
        return func(*args, **(kwargs or {}))
