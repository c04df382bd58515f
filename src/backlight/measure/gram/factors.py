"""What one use of a parameter leaves behind for its per-sample gradients, without forming them.

N samples, T positions within a sample, g groups, i inputs and o outputs of a group, d width, R rows and
C columns of a parameter seen as a matrix. A matrix parameter has ``g o`` rows and i columns. Each piece
can give any rows of the per-sample gradients, ``[N, rows, C]``: the chunked kernel walks them, and the
pieces of a parameter that is used several times add up row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in a type that products can be summed in: 16-bit values as float32."""
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor


def lengths(tensor: Tensor) -> Tensor:
    """Return Euclidean norms along the last dimension."""
    values = wide(tensor)
    if values.stride(-1) == 1:
        norms: Tensor = torch.linalg.vector_norm(values, dim=-1)
        return norms
    return values.square().sum(-1).sqrt_()  # vector_norm is slow along any other dimension


@dataclass(frozen=True)
class Factors:
    """A matrix product: the gradient of a sample is ``sum_t delta[n, t]^T x[n, t]``, group by group.

    ``delta`` is ``[N, T, g, o]``; ``inputs(a, b)`` gives the inputs ``[b - a, T, g, i]`` of samples a to
    b, so that a convolution unfolds only what is at work; ``lengths()`` gives their Euclidean norms
    ``[N, T, g]``. ``columns`` is i, and ``reread`` the least number of rows that are worth asking for the
    inputs again. ``direct()``, where there is one, gives all gradients ``[N, g o, i]`` faster than the
    product; ``held`` says that the inputs lie in memory as they are.
    """

    delta: Tensor
    inputs: Callable[[int, int], Tensor]
    lengths: Callable[[], Tensor]
    columns: int
    reread: int = 16
    direct: Callable[[], Tensor] | None = None
    held: bool = False

    @property
    def samples(self) -> int:
        """N."""
        return self.delta.shape[0]

    @property
    def positions(self) -> int:
        """T."""
        return self.delta.shape[1]

    @property
    def groups(self) -> int:
        """G."""
        return self.delta.shape[2]

    @property
    def rows(self) -> int:
        """Rows of the parameter, over all groups."""
        return self.delta.shape[2] * self.delta.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """The type that the product came in."""
        return self.delta.dtype

    def all_inputs(self) -> Tensor:
        """Return the inputs of every sample, ``[N, T, g, i]``."""
        return self.inputs(0, self.samples)

    def transposed(self) -> Factors | None:
        """Return the piece of the transposed matrix; None where its inputs would have to be made first."""
        if not self.held or self.groups > 1:
            return None
        delta = self.delta
        return Factors(self.all_inputs(), lambda a, b: delta[a:b], self.lengths, delta.shape[3], held=True)

    def take(self, start: int, stop: int, out: Tensor, *, add: bool) -> None:
        """Write or add rows ``start`` to ``stop`` of every sample's gradient to ``out`` ``[N, rows, i]``.

        The rows lie within one group, or are whole groups.
        """
        width = self.delta.shape[3]
        first, last = start // width, -(-stop // width)
        block = max(1, BLOCK // max(1, self.positions * (last - first) * self.columns))
        for a in range(0, self.samples, block):
            b = min(self.samples, a + block)
            x_NTgi = wide(self.inputs(a, b)[:, :, first:last])
            d_NTgo = wide(self.delta[a:b, :, first:last]).to(x_NTgi.dtype)
            if last - first == 1:
                d_NTo = d_NTgo[:, :, 0, start - first * width : stop - first * width]
                _product(d_NTo, x_NTgi[:, :, 0], out[a:b], add)
            else:
                d = d_NTgo.permute(0, 2, 3, 1).flatten(0, 1)
                x = x_NTgi.permute(0, 2, 1, 3).flatten(0, 1)
                product = torch.bmm(d, x).view(b - a, stop - start, self.columns)
                if add:
                    out[a:b] += product
                else:  # what was there may be anything, NaN as well
                    out[a:b] = product

    def size(self) -> float:
        """Return the root of the summed squares of all summands ``delta[n, t] x[n, t]``."""
        return float(torch.linalg.vector_norm(lengths(self.delta).mul_(self.lengths())))


def _product(d_NTo: Tensor, x_NTi: Tensor, out: Tensor, add: bool) -> None:
    if d_NTo.shape[1] > 1:
        out.baddbmm_(d_NTo.transpose(1, 2), x_NTi, beta=int(add))
    elif add:
        out.addcmul_(d_NTo[:, 0, :, None], x_NTi)
    else:
        torch.mul(d_NTo[:, 0, :, None], x_NTi, out=out)


@dataclass(frozen=True)
class Lookup:
    """A table looked up: row ``ids[n, t]`` of the gradient of sample n receives ``delta[n, t]``.

    ``ids`` is ``[N, T]``, ``delta`` ``[N, T, d]`` with zeros where the padding row was read; ``rows`` is
    the height of the table.
    """

    ids: Tensor
    delta: Tensor
    rows: int

    @property
    def samples(self) -> int:
        """N."""
        return self.delta.shape[0]

    @property
    def positions(self) -> int:
        """T."""
        return self.delta.shape[1]

    @property
    def columns(self) -> int:
        """D."""
        return self.delta.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The type that the gradient came in."""
        return self.delta.dtype

    def take(self, start: int, stop: int, out: Tensor, *, add: bool) -> None:
        """Write or add rows ``start`` to ``stop`` of every sample's gradient to ``out`` ``[N, rows, d]``."""
        if not add:
            out.zero_()
        if start == 0 and stop >= self.rows:
            ids, delta = self.ids.reshape(-1), self.delta.reshape(-1, self.columns)
            samples = torch.arange(self.samples, device=ids.device).repeat_interleave(self.positions)
        else:
            n, t = ((self.ids >= start) & (self.ids < stop)).nonzero(as_tuple=True)
            ids, delta, samples = self.ids[n, t] - start, self.delta[n, t], n
        flat = out.view(-1, self.columns)
        flat.index_add_(0, samples * (stop - start) + ids, delta.to(out.dtype))

    def size(self) -> float:
        """Return the root of the summed squares of all summands."""
        return float(torch.linalg.vector_norm(wide(self.delta)))


@dataclass(frozen=True)
class Vectors:
    """Per-sample gradients that are small enough to be there, ``[N, C]`` (a bias, a norm's weight).

    ``summands`` is the root of the summed squares of what was added up to get them.
    """

    values: Tensor
    summands: float
    dtype: torch.dtype
    rows: int = field(default=1)

    @property
    def samples(self) -> int:
        """N."""
        return self.values.shape[0]

    @property
    def columns(self) -> int:
        """C."""
        return self.values.shape[1] // self.rows

    def take(self, start: int, stop: int, out: Tensor, *, add: bool) -> None:
        """Write or add rows ``start`` to ``stop`` of every sample's gradient to ``out`` ``[N, rows, C]``."""
        if not add:
            out.zero_()
        out += self.values.view(self.samples, self.rows, self.columns)[:, start:stop]

    def size(self) -> float:
        """Return the root of the summed squares of all summands."""
        return self.summands


Piece = Factors | Lookup | Vectors

BLOCK = 1 << 19
"""Most elements of unfolded inputs at work at once: 2 MB in float32, which a cache holds."""


def layout(pieces: Sequence[Piece]) -> tuple[int, int, int]:
    """Return N, rows and columns of the pieces of one parameter.

    Raises
    ------
    ValueError
        If the pieces see the parameter as matrices of different shapes.
    """
    shapes = {(piece.samples, piece.rows, piece.columns) for piece in pieces}
    if len(shapes) != 1:
        raise ValueError(f"pieces of one parameter differ in samples, rows or columns: {sorted(shapes)}")
    return shapes.pop()


def precision(pieces: Sequence[Piece]) -> torch.dtype:
    """Return the coarsest type among the pieces, which bounds what their products can be trusted for."""
    return max((piece.dtype for piece in pieces), key=lambda dtype: torch.finfo(dtype).eps)


def working_dtype(pieces: Sequence[Piece]) -> torch.dtype:
    """Return the type in which rows of per-sample gradients are formed."""
    return torch.float64 if any(piece.dtype == torch.float64 for piece in pieces) else torch.float32
