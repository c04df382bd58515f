"""Pieces of some samples kept until those of all samples are there, and joined along the samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from backlight.measure.gram.factors import Factors, Lookup, Piece, Vectors, layout, precision, working_dtype


def kept(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces of one parameter in the form that takes least memory: as they are, or as gradients.

    Raises
    ------
    ValueError
        If the pieces do not fit together.
    """
    n, rows, columns = layout(pieces)
    dtype = working_dtype(pieces)
    if _bytes(pieces) <= n * rows * columns * dtype.itemsize:
        return list(pieces)
    G = torch.empty(n, rows, columns, dtype=dtype, device=_device(pieces[0]))
    for number, piece in enumerate(pieces):
        piece.take(0, rows, G, add=number > 0)
    summands = math.sqrt(sum(piece.size() ** 2 for piece in pieces))
    return [Vectors(G.view(n, -1), summands, precision(pieces), rows)]


def _bytes(pieces: Sequence[Piece]) -> float:
    """Return the bytes that pieces hold; infinite where inputs are made from something else."""
    total = 0.0
    for piece in pieces:
        if isinstance(piece, Vectors):
            total += piece.values.nbytes
        elif isinstance(piece, Lookup):
            total += piece.ids.nbytes + piece.delta.nbytes
        else:
            total += piece.delta.nbytes + piece.all_inputs().nbytes if piece.held else math.inf
    return total


def _device(piece: Piece) -> torch.device:
    return piece.values.device if isinstance(piece, Vectors) else piece.delta.device


def joined(parts: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Return the pieces of all samples from those of their parts, in order.

    Raises
    ------
    ValueError
        If a parameter was used differently in the parts.
    """
    if len(parts) == 1:
        return list(parts[0])
    if len({tuple(type(piece) for piece in part) for part in parts}) > 1:
        raise ValueError("it is used differently by different samples")
    return [_joined(uses) for uses in zip(*parts, strict=True)]


def _joined(uses: Sequence[Piece]) -> Piece:
    first = uses[0]
    if isinstance(first, Lookup):
        same = [use for use in uses if isinstance(use, Lookup)]
        return Lookup(_cat([u.ids for u in same]), _cat([u.delta for u in same]), first.rows)
    if isinstance(first, Vectors):
        made = [use for use in uses if isinstance(use, Vectors)]
        size = math.sqrt(sum(use.summands**2 for use in made))
        return Vectors(_cat([use.values for use in made]), size, first.dtype, first.rows)
    products = [use for use in uses if isinstance(use, Factors)]
    inputs = _cat([use.all_inputs() for use in products])
    return Factors(
        _cat([use.delta for use in products]),
        lambda a, b: inputs[a:b],
        lambda: _cat([use.lengths() for use in products]),
        first.columns,
        held=True,
    )


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        raise ValueError("its uses have different numbers of positions in different samples")
    return torch.cat(list(tensors))


__all__ = ["joined", "kept"]
