"""The temporal product: the Gram of the last W logged gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Window:
    """The gradients of the last ``length`` logged steps, on the host, as they were.

    Their W x W Gram has the non-zero spectrum of the M x M product ``sum_t g_t g_t^T``, which nobody has
    to build. Products are accumulated in float64.
    """

    def __init__(self, length: int) -> None:
        self._held: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=length)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Take the gradients of one step; the oldest step leaves a full window."""
        self._held.append((step, dict(gradients)))

    def gram(self) -> tuple[npt.NDArray[np.float64], list[int]]:
        """Return ``K[a, b] = g_a . g_b``, ``[W, W]``, over all parameters, and the steps of its rows.

        A parameter without a gradient at some step counts as zero there.
        """
        steps = [step for step, _ in self._held]
        K = torch.zeros(len(steps), len(steps), dtype=torch.float64)
        names = dict.fromkeys(name for _, held in self._held for name in held)
        for name in names:
            rows = [held.get(name) for _, held in self._held]
            like = next(row for row in rows if row is not None)
            wide = torch.complex128 if like.is_complex() else torch.float64
            A = torch.stack(
                [torch.zeros(like.numel(), dtype=wide) if r is None else r.reshape(-1).to(wide) for r in rows]
            )
            if A.is_complex():
                A = torch.view_as_real(A).flatten(1)
            K.addmm_(A, A.T)
        return K.numpy(), steps

    def state(self) -> dict[str, Any]:
        """Return the window as plain lists and tensors."""
        return {"steps": [step for step, _ in self._held], "gradients": [held for _, held in self._held]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave."""
        self._held.clear()
        for step, held in zip(state["steps"], state["gradients"], strict=True):
            self._held.append((int(step), dict(held)))
