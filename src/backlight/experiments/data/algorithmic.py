"""Tables of symbols: modular arithmetic, permutations, and a knowledge graph with two-hop questions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.experiments.data.split import Split, generator

Operation = Callable[[Tensor, Tensor, int], Tensor]


def _divide(a: Tensor, b: Tensor, p: int) -> Tensor:
    inverses = torch.tensor([0, *(pow(n, -1, p) for n in range(1, p))])
    return a * inverses[b] % p


OPERATIONS: dict[str, Operation] = {
    "add": lambda a, b, p: (a + b) % p,
    "subtract": lambda a, b, p: (a - b) % p,
    "multiply": lambda a, b, p: a * b % p,
    "divide": _divide,
    "squares": lambda a, b, p: (a * a + b * b) % p,
}


def modular_table(p: int, operation: str = "add") -> tuple[Tensor, Tensor]:
    """Return pairs [n, 2] and results [n] of ``operation`` mod ``p``, int64, in order of a then b."""
    # n is p², or p(p - 1) for "divide", where b = 0 is left out.
    if operation not in OPERATIONS:
        raise ValueError(f"operation is {operation!r}, expected one of {', '.join(OPERATIONS)}")
    if p < 2:
        raise ValueError(f"p is {p}, expected at least 2")
    if operation == "divide" and any(p % d == 0 for d in range(2, int(p**0.5) + 1)):
        raise ValueError(f"p is {p}, expected a prime, which division mod p needs")
    first = 1 if operation == "divide" else 0
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(first, p))
    return pairs, OPERATIONS[operation](pairs[:, 0], pairs[:, 1], p)


def unordered(pairs: Tensor, results: Tensor) -> tuple[Tensor, Tensor]:
    """Return the samples with a ≤ b, for nets that cannot distinguish (a, b) from (b, a)."""
    # For such a net a test pair whose mirror image was trained on is no new sample.
    first = pairs[:, 0] <= pairs[:, 1]
    table = {(a, b): result for (a, b), result in zip(pairs.tolist(), results.tolist(), strict=True)}
    mixed = next((pair for pair in table if table.get(pair[::-1]) != table[pair]), None)
    if mixed is not None:
        raise ValueError(
            f"the operation is not commutative: {mixed} and {mixed[::-1]} have different results, but the "
            "net adds their embeddings; choose data.operation add, multiply or squares"
        )
    return pairs[first], results[first]


def one_hot_pairs(pairs: Tensor, p: int) -> Tensor:
    """Return pairs [n, 2] as [n, 2p] fp32: one-hot of a, then one-hot of b."""
    return torch.nn.functional.one_hot(pairs, p).flatten(1).to(torch.float32)


def permutation_table(degree: int = 5) -> tuple[Tensor, Tensor]:
    """Return pairs [n², 2] and results [n²] of a∘b in S_degree, with n = degree!, int64.

    Permutations are numbered in lexicographic order, 0 being the identity, and
    (a∘b)(x) = a(b(x)): b acts first.
    """
    elements = torch.tensor(list(itertools.permutations(range(degree))))
    count = len(elements)
    weights = degree ** torch.arange(degree)
    codes = elements @ weights
    order = torch.argsort(codes)
    pairs = torch.cartesian_prod(torch.arange(count), torch.arange(count))
    composed = torch.gather(elements[pairs[:, 0]], 1, elements[pairs[:, 1]])
    return pairs, order[torch.searchsorted(codes[order], composed @ weights)]


NO_TOKEN = -1
"""Fills the second relation of an atomic fact."""


@dataclass(frozen=True)
class KnowledgeGraph:
    """Questions [n, 3] (head, relation, second relation or :data:`NO_TOKEN`) and answers [n], as tokens.

    Tokens 0 to entities - 1 are entities, those after are relations. Training is on all atomic facts, then
    on some inferred ones; ``atomic`` counts the former.
    """

    split: Split
    foreign_questions: Tensor
    foreign_answers: Tensor
    atomic: int


def knowledge_graph(
    entities: int, relations: int, degree: int, foreign_share: float, inferred_ratio: float, seed: int
) -> KnowledgeGraph:
    """Draw a random graph of two-hop questions, as Wang et al. (2405.15071) make theirs.

    An atomic fact (h, r, t) is an edge, an inferred fact (h, r₁, r₂, t) two consecutive edges. Each entity
    has ``degree`` outgoing facts with distinct relations and random tails. A share ``foreign_share`` of the
    atomic facts is set aside: it is trained on as facts, but no inferred fact that uses it is. Inferred
    facts of two set-aside facts are out of distribution. Of those of two others, ``inferred_ratio`` (the
    paper's φ) for each such atomic fact are trained on, and the rest is the in-distribution test.

    Raises
    ------
    ValueError
        If a relation would have to occur twice at an entity, or too few inferred facts exist.
    """
    if not 0 < degree <= relations:
        raise ValueError(f"data.degree is {degree}, expected 1 to {relations}, the number of relations")
    draw = generator(seed, "knowledge graph")
    chosen = torch.stack([torch.randperm(relations, generator=draw)[:degree] for _ in range(entities)])
    tails = torch.randint(entities, (entities, degree), generator=draw)
    facts = [
        (head, int(relation), int(tail))
        for head in range(entities)
        for relation, tail in zip(chosen[head], tails[head], strict=True)
    ]
    foreign = set(torch.randperm(len(facts), generator=draw)[: round(foreign_share * len(facts))].tolist())
    outgoing: dict[int, list[int]] = {}
    for number, (head, _, _) in enumerate(facts):
        outgoing.setdefault(head, []).append(number)
    native: list[tuple[int, int, int, int]] = []
    out_of_distribution: list[tuple[int, int, int, int]] = []
    for first, (head, relation, bridge) in enumerate(facts):
        for second in outgoing[bridge]:
            question = (head, entities + relation, entities + facts[second][1], facts[second][2])
            if first in foreign and second in foreign:
                out_of_distribution.append(question)
            elif first not in foreign and second not in foreign:
                native.append(question)
    wanted = round(inferred_ratio * (len(facts) - len(foreign)))
    if not 0 < wanted < len(native) or not out_of_distribution:
        raise ValueError(
            f"data.inferred_ratio {inferred_ratio} asks for {wanted} inferred facts in training, "
            f"expected 1 to {len(native) - 1} ({len(out_of_distribution)} are out of distribution); "
            "change data.inferred_ratio, data.degree or data.foreign_share"
        )
    order = torch.randperm(len(native), generator=draw)
    inferred = torch.tensor(native)[order]
    atomic = torch.tensor([(head, entities + relation, NO_TOKEN, tail) for head, relation, tail in facts])
    train, test = torch.cat([atomic, inferred[:wanted]]), inferred[wanted:]
    others = torch.tensor(out_of_distribution)
    split = Split(train[:, :3], train[:, 3], test[:, :3], test[:, 3])
    return KnowledgeGraph(split, others[:, :3], others[:, 3], len(facts))
