"""Tables of modular arithmetic: every pair (a, b) of residues mod p with its result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Operation = Callable[[Tensor, Tensor, int], Tensor]


def _divide(a: Tensor, b: Tensor, p: int) -> Tensor:
    # Fermat: b^(p-2) inverts b modulo a prime p; products stay far below 2⁶³.
    inverse = torch.ones_like(b)
    base, exponent = b % p, p - 2
    while exponent:
        if exponent & 1:
            inverse = inverse * base % p
        base = base * base % p
        exponent >>= 1
    return a * inverse % p


OPERATIONS: dict[str, Operation] = {
    "add": lambda a, b, p: (a + b) % p,
    "subtract": lambda a, b, p: (a - b) % p,
    "multiply": lambda a, b, p: a * b % p,
    "divide": _divide,
    "squares": lambda a, b, p: (a * a + b * b) % p,
}


def modular_table(p: int, operation: str = "add") -> tuple[Tensor, Tensor]:
    """Return pairs [n, 2] and results [n] of ``operation`` mod ``p``, int64, in order of a then b.

    n is p², or p(p - 1) for ``"divide"``, where b = 0 is left out.

    Raises
    ------
    ValueError
        If there is no such operation, or ``p`` is no prime where division needs one.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation is {operation!r}, expected one of {', '.join(OPERATIONS)}")
    if p < 2:
        raise ValueError(f"p is {p}, expected at least 2")
    if operation == "divide" and any(p % d == 0 for d in range(2, int(p**0.5) + 1)):
        raise ValueError(f"p is {p}, expected a prime: division mod p needs one")
    first = 1 if operation == "divide" else 0
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(first, p))
    return pairs, OPERATIONS[operation](pairs[:, 0], pairs[:, 1], p)


def unordered(pairs: Tensor, results: Tensor) -> tuple[Tensor, Tensor]:
    """Return the samples with a ≤ b alone, for nets that cannot tell (a, b) from (b, a).

    To such a net a test pair whose mirror image was trained on is no new sample.

    Raises
    ------
    ValueError
        If the operation is not commutative, so that one input would have two results.
    """
    first = pairs[:, 0] <= pairs[:, 1]
    table = {(a, b): result for (a, b), result in zip(pairs.tolist(), results.tolist(), strict=True)}
    odd = next((pair for pair in table if table.get(pair[::-1]) != table[pair]), None)
    if odd is not None:
        raise ValueError(
            f"the operation is not commutative: {odd} and {odd[::-1]} have different results, but the "
            "net adds their embeddings; choose data.operation add, multiply or squares"
        )
    return pairs[first], results[first]


def one_hot_pairs(pairs: Tensor, p: int) -> Tensor:
    """Return pairs [n, 2] as [n, 2p] fp32: one-hot of a beside one-hot of b."""
    return torch.nn.functional.one_hot(pairs, p).flatten(1).to(torch.float32)
