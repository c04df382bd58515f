"""Operations of backlight outside of the modes of the script, which would see them, and may draw numbers.

Functions of tensor subclasses are left by ``torch._C.DisableTorchFunction``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

count_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)
"""Returns how many dispatch modes this thread has entered, 0 where torch does not say."""


def outside_modes() -> AbstractContextManager[Any]:
    """Return what leaves the dispatch modes of the script for a while.

    Where each call counts, :data:`count_modes` is asked first: a mode is rare.
    """
    if not count_modes():
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415 - rarely needed

    return _disable_current_modes()
