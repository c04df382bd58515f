"""Frequent Directions: a sketch of a stream of rows with a bound of its own error.

B ``[rows, M]`` approximates A ``[n, M]``, the rows added so far: ``0 <= A^T A - B^T B <= shrinkage I``. The
shrinkage is summed with the sketch, so it bounds the error of this stream; sketches merge. Source: Ghashami,
Liberty, Phillips and Woodruff, 1501.01711; docs/formulas.md, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class FrequentDirections:
    """A sketch of ``rows`` rows of ``columns`` numbers; twice as many rows are in memory.

    Rows are kept in ``dtype`` on ``device``; the shrinkage is computed in float64, and does not cover the
    rounding of rows kept in float32. ``seen`` rows were added, and no eigenvalue of A^T A - B^T B is larger
    than ``shrinkage``.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        if rows < 1 or columns < 1:
            raise ValueError(f"sketch: rows and columns must be at least 1, got {rows} and {columns}")
        self.size, self.columns = rows, columns
        self.shrinkage = 0.0
        self.seen = 0
        self._buffer = torch.zeros(2 * rows, columns, dtype=dtype, device=device)
        self._filled = 0

    def add(self, rows_nM: Tensor) -> None:
        """Add finite rows ``[n, M]``, or one ``[M]``; others raise ValueError and change nothing."""
        rows = rows_nM.detach().reshape(-1, rows_nM.shape[-1]) if rows_nM.dim() else rows_nM
        if rows.dim() != 2 or rows.shape[1] != self.columns:
            raise ValueError(f"sketch: expected rows of {self.columns} numbers, got {list(rows_nM.shape)}")
        if not bool(torch.isfinite(rows).all()):
            raise ValueError("sketch: a row holds values that are not finite; the sketch was left as it was")
        self.seen += rows.shape[0]
        self._append(rows)

    def _append(self, rows: Tensor) -> None:
        start = 0
        while start < rows.shape[0]:
            if self._filled == len(self._buffer):
                self._shrink()
            stop = min(rows.shape[0], start + len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + stop - start] = rows[start:stop].to(self._buffer)
            self._filled += stop - start
            start = stop

    def _shrink(self) -> None:
        """Reduce the buffer to ``size`` rows: subtract the next squared singular value from all of them."""
        filled = self._buffer[: self._filled]
        wide = filled.double()
        # Singular vectors from the small Gram: exact enough, since what it loses is far below the cut.
        values, left = torch.linalg.eigh(wide @ wide.T)
        values, left = values.flip(0).clamp(min=0), left.flip(1)
        if self._filled <= self.size:
            return
        cut = float(values[self.size])
        self.shrinkage += cut
        kept = values[: self.size]
        scale = torch.where(
            kept > cut,
            ((kept - cut).clamp(min=0) / kept.clamp(min=torch.finfo(torch.float64).tiny)).sqrt(),
            0.0,
        )
        self._buffer[: self.size] = (left[:, : self.size] * scale).T @ wide
        self._buffer[self.size :] = 0
        self._filled = self.size

    def merge(self, other: FrequentDirections) -> None:
        """Add the sketch of another stream of the same M: the result is a sketch of both, with its bound."""
        if other.columns != self.columns:
            raise ValueError(f"sketch: cannot merge {other.columns} columns into {self.columns}")
        self._append(other._buffer[: other._filled])
        self.shrinkage += other.shrinkage
        self.seen += other.seen

    def rows(self) -> Tensor:
        """Return B, at most ``size`` rows ``[r, M]``; more rows can be added afterwards."""
        if self._filled > self.size:
            self._shrink()
        return self._buffer[: self._filled].clone()

    def state(self) -> dict[str, Any]:
        """Return the state, with all rows in memory, from which :meth:`from_state` continues exactly."""
        return {
            "size": self.size,
            "rows": self._buffer[: self._filled].clone(),
            "shrinkage": self.shrinkage,
            "seen": self.seen,
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], *, device: torch.device | str = "cpu"
    ) -> FrequentDirections:
        """Return the sketch that returned ``state``, with the type of its rows; ValueError if incomplete."""
        missing = {"size", "rows", "shrinkage", "seen"} - state.keys()
        if missing:
            raise ValueError(
                f"sketch: the state lacks {', '.join(sorted(missing))}; give what state() returned"
            )
        size, rows = int(state["size"]), torch.as_tensor(state["rows"])
        if rows.dim() != 2 or len(rows) > 2 * size:
            raise ValueError(f"sketch: expected at most {2 * size} rows, got {list(rows.shape)}")
        made = cls(size, rows.shape[1], dtype=rows.dtype, device=device)
        made._append(rows)
        made.shrinkage, made.seen = float(state["shrinkage"]), int(state["seen"])
        return made
