"""What one use of a parameter contributes to its per-sample gradients, as factors that do not form them.

N samples, T positions within a sample, g groups, i inputs and o outputs of a group, d width, R rows and C
columns of a parameter seen as a matrix. A matrix parameter has ``g o`` rows and i columns. Each use can
return any rows of the per-sample gradients, ``[N, rows, C]``: the chunked kernel iterates over them, and the
uses of a parameter add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from backlight.measure.stats.kernels import promoted


def lengths(tensor: Tensor) -> Tensor:
    """Return Euclidean norms along the last dimension."""
    values = promoted(tensor)
    if values.stride(-1) == 1:
        norms: Tensor = torch.linalg.vector_norm(values, dim=-1)
        return norms
    return values.square().sum(-1).sqrt_()  # vector_norm is slow along any other dimension


class _OfDelta:
    """Factors read from the gradient of the output, ``[N, T, ...]``."""

    delta: Tensor

    @property
    def samples(self) -> int:
        """N."""
        return self.delta.shape[0]

    @property
    def positions(self) -> int:
        """T."""
        return self.delta.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The type that the gradient was computed in."""
        return self.delta.dtype


@dataclass(frozen=True)
class MatrixFactors(_OfDelta):
    """A matrix product: the gradient of a sample is ``sum_t delta[n, t]^T x[n, t]``, group by group.

    ``delta`` is ``[N, T, g, o]``; ``inputs(a, b)`` returns the inputs ``[b - a, T, g, i]`` of samples a to
    b, so that a convolution unfolds only the samples in use; ``lengths()`` returns their Euclidean norms
    ``[N, T, g]``. ``columns`` is i, and ``reread`` the least number of rows that justify reading the inputs
    again. ``direct(a, b)``, where there is one, returns the gradients ``[b - a, g o, i]`` of samples a to b
    faster than the product; ``in_memory`` says that the inputs are in memory.
    """

    delta: Tensor
    inputs: Callable[[int, int], Tensor]
    lengths: Callable[[], Tensor]
    columns: int
    reread: int = 16
    direct: Callable[[int, int], Tensor] | None = None
    in_memory: bool = False

    @property
    def groups(self) -> int:
        """G."""
        return self.delta.shape[2]

    @property
    def rows(self) -> int:
        """Rows of the parameter, over all groups."""
        return self.delta.shape[2] * self.delta.shape[3]

    def all_inputs(self) -> Tensor:
        """Return the inputs of every sample, ``[N, T, g, i]``."""
        return self.inputs(0, self.samples)

    def transposed(self) -> MatrixFactors | None:
        """Return the factors of the transposed matrix; None where its inputs are not in memory."""
        if not self.in_memory or self.groups > 1:
            return None
        delta = self.delta
        return MatrixFactors(
            self.all_inputs(), lambda a, b: delta[a:b], self.lengths, delta.shape[3], in_memory=True
        )

    def take(self, start: int, stop: int, out: Tensor, *, add: bool) -> None:
        """Write or add rows ``start`` to ``stop`` of every sample, within a group or whole groups."""
        if self.direct is not None and stop - start == self.rows:
            block = max(1, DIRECT_SCALARS // (self.rows * self.columns))
            for a in range(0, self.samples, block):
                b = min(self.samples, a + block)
                if add:
                    out[a:b] += self.direct(a, b)
                else:
                    out[a:b] = self.direct(a, b)
            return
        width = self.delta.shape[3]
        first, last = start // width, -(-stop // width)
        block = max(1, BLOCK_SCALARS // max(1, self.positions * (last - first) * self.columns))
        for a in range(0, self.samples, block):
            b = min(self.samples, a + block)
            x_NTgi = promoted(self.inputs(a, b)[:, :, first:last])
            d_NTgo = promoted(self.delta[a:b, :, first:last]).to(x_NTgi.dtype)
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

    def sizes(self) -> Tensor:
        """Return the root of each sample's summed squares of summands ``delta[n, t] x[n, t]``, ``[N]``."""
        return lengths(lengths(self.delta).mul_(self.lengths()).flatten(1))


def _product(d_NTo: Tensor, x_NTi: Tensor, out: Tensor, add: bool) -> None:
    if d_NTo.shape[1] > 1:
        out.baddbmm_(d_NTo.transpose(1, 2), x_NTi, beta=int(add))
    elif add:
        out.addcmul_(d_NTo[:, 0, :, None], x_NTi)
    else:
        torch.mul(d_NTo[:, 0, :, None], x_NTi, out=out)


@dataclass(frozen=True)
class LookupFactors(_OfDelta):
    """A table of ``rows`` rows: row ``ids[n, t]`` of the gradient of sample n receives ``delta[n, t]``."""

    ids: Tensor  # [N, T]
    delta: Tensor  # [N, T, d], zeros for the padding row
    rows: int

    @property
    def columns(self) -> int:
        """D."""
        return self.delta.shape[2]

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

    def sizes(self) -> Tensor:
        """Return the root of each sample's summed squares of summands, ``[N]``."""
        return lengths(self.delta.flatten(1))


@dataclass(frozen=True)
class VectorFactors:
    """Per-sample gradients that are small enough to be stored, ``[N, C]`` (a bias, the weight of a norm)."""

    values: Tensor
    summands: Callable[[], Tensor]  # [N], root of the summed squares of the terms that were added
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

    def sizes(self) -> Tensor:
        """Return the root of each sample's summed squares of summands, ``[N]``."""
        return self.summands()


Factors = MatrixFactors | LookupFactors | VectorFactors

BLOCK_SCALARS = 1 << 19
"""Most elements of unfolded inputs at work at once: 2 MB in float32, which a cache holds."""

DIRECT_SCALARS = 1 << 17
"""Most elements of gradients that torch computes at once: more is fresh memory at each call, which costs as
much as the gradients."""


def common_shape(uses: Sequence[Factors]) -> tuple[int, int, int]:
    """Return N, rows and columns of the uses of one parameter; ValueError where they differ."""
    shapes = {(use.samples, use.rows, use.columns) for use in uses}
    if len(shapes) != 1:
        raise ValueError(f"uses of one parameter differ in samples, rows or columns: {sorted(shapes)}")
    return shapes.pop()


def coarsest_dtype(uses: Sequence[Factors]) -> torch.dtype:
    """Return the coarsest type among the uses, which bounds the precision of their products."""
    return max((use.dtype for use in uses), key=lambda dtype: torch.finfo(dtype).eps)


def working_dtype(uses: Sequence[Factors]) -> torch.dtype:
    """Return the type in which rows of per-sample gradients are formed."""
    return torch.float64 if any(use.dtype == torch.float64 for use in uses) else torch.float32


def compress(uses: Sequence[Factors]) -> list[Factors]:
    """Return the uses of one parameter in the form that takes least memory: as they are, or as gradients."""
    n, rows, columns = common_shape(uses)
    dtype = working_dtype(uses)
    if _bytes(uses) <= n * rows * columns * dtype.itemsize:
        return [_materialised(use) for use in uses]
    G = torch.empty(n, rows, columns, dtype=dtype, device=device_of(uses[0]))
    for number, use in enumerate(uses):
        use.take(0, rows, G, add=number > 0)
    return [VectorFactors(G.view(n, -1), _constant(sizes(uses)), coarsest_dtype(uses), rows)]


def sizes(uses: Sequence[Factors]) -> Tensor:
    """Return the root of each sample's summed squares of what its gradient is added up from, ``[N]``."""
    return torch.stack([use.sizes() for use in uses]).square().sum(0).sqrt()


def _materialised(use: Factors) -> Factors:
    return replace(use, summands=_constant(use.sizes())) if isinstance(use, VectorFactors) else use


def _constant(values: Tensor) -> Callable[[], Tensor]:
    return lambda: values


def _bytes(uses: Sequence[Factors]) -> float:
    """Return the bytes that uses hold; infinite where inputs are computed from something else."""
    total = 0.0
    for use in uses:
        if isinstance(use, VectorFactors):
            total += use.values.nbytes
        elif isinstance(use, LookupFactors):
            total += use.ids.nbytes + use.delta.nbytes
        else:
            total += use.delta.nbytes + use.all_inputs().nbytes if use.in_memory else math.inf
    return total


def device_of(use: Factors) -> torch.device:
    """Return the device of the factors."""
    return use.values.device if isinstance(use, VectorFactors) else use.delta.device


def concatenate(by_part: Sequence[Sequence[Factors]]) -> list[Factors]:
    """Return the uses of all samples from those of parts; ValueError if the parts differ in their uses."""
    if len(by_part) == 1:
        return list(by_part[0])
    if len({tuple(type(use) for use in part) for part in by_part}) > 1:
        raise ValueError("it is used differently by different samples")
    return [_concatenate(uses) for uses in zip(*by_part, strict=True)]


def _concatenate(uses: Sequence[Factors]) -> Factors:
    first = uses[0]
    if isinstance(first, LookupFactors):
        same = [use for use in uses if isinstance(use, LookupFactors)]
        return LookupFactors(_cat([u.ids for u in same]), _cat([u.delta for u in same]), first.rows)
    if isinstance(first, VectorFactors):
        made = [use for use in uses if isinstance(use, VectorFactors)]
        summands = _cat([use.sizes() for use in made])
        return VectorFactors(_cat([use.values for use in made]), _constant(summands), first.dtype, first.rows)
    products = [use for use in uses if isinstance(use, MatrixFactors)]
    inputs = _cat([use.all_inputs() for use in products])
    return MatrixFactors(
        _cat([use.delta for use in products]),
        lambda a, b: inputs[a:b],
        lambda: _cat([use.lengths() for use in products]),
        first.columns,
        in_memory=True,
    )


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        raise ValueError("its uses have different numbers of positions in different samples")
    return torch.cat(list(tensors))


# Inner products of per-sample gradients with one gradient, by position: ``<g_nt, G>`` without forming g.
#
# A sample's products over all its positions add up to ``<g_n, G>``, those of all samples to ``<sum_n g_n,
# G>``. N samples, T positions; docs/formulas.md, section 3.


@torch.no_grad()
def projections(uses: Sequence[Factors], gradient: Tensor) -> list[Tensor]:
    """Return the products of each use of a parameter with its ``gradient``, float64 ``[N, T]`` each.

    ``gradient`` has the shape of the parameter. T is 1 where a use keeps no positions.
    """
    return [_of_use(use, promoted(gradient)) for use in uses]


def _of_use(use: Factors, gradient: Tensor) -> Tensor:
    if isinstance(use, VectorFactors):
        return (use.values.double() @ gradient.double().reshape(-1)).unsqueeze(1)
    if isinstance(use, LookupFactors):
        table = gradient.reshape(-1, use.columns)
        return (table[use.ids].double() * promoted(use.delta).double()).sum(-1)
    return _of_matrix(use, gradient.reshape(use.groups, -1, use.columns))


def _of_matrix(use: MatrixFactors, G_goi: Tensor) -> Tensor:
    sums = []
    for n in range(use.samples):  # a convolution unfolds one sample at a time
        x_Tgi = promoted(use.inputs(n, n + 1)[0])
        d_Tgo = promoted(use.delta[n])
        mapped_gTo = torch.bmm(x_Tgi.transpose(0, 1).to(G_goi.dtype), G_goi.transpose(1, 2))
        sums.append((mapped_gTo.double() * d_Tgo.transpose(0, 1).double()).sum((0, 2)))
    return torch.stack(sums)
