"""A random knowledge graph with two-hop questions, as Wang et al. (2405.15071) make theirs.

Entities e and relations r; an atomic fact (h, r, t) is an edge, an inferred fact (h, r₁, r₂, t) two
edges one after the other. A small share of the atomic facts is set aside: it is trained on as facts,
but no inferred fact that uses it is trained on. Inferred facts of two set-aside facts are out of
distribution; those of two others that are not trained on are the in-distribution test.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.experiments.data.random_streams import generator

NO_TOKEN = -1
"""Stands where an atomic fact has no second relation."""


@dataclass(frozen=True)
class KnowledgeGraph:
    """Questions [n, 3] (head, relation, second relation or :data:`NO_TOKEN`) and answers [n], as tokens.

    Tokens 0 to entities - 1 are entities, those after are relations. ``train`` holds all atomic facts,
    then the inferred ones that are trained on; ``atomic`` says how many of it are atomic.
    """

    train_questions: Tensor
    train_answers: Tensor
    test_questions: Tensor
    test_answers: Tensor
    foreign_questions: Tensor
    foreign_answers: Tensor
    atomic: int


def knowledge_graph(
    entities: int, relations: int, degree: int, foreign_share: float, inferred_ratio: float, seed: int
) -> KnowledgeGraph:
    """Draw a graph.

    Parameters
    ----------
    degree:
        Outgoing facts of each entity, each with a relation of its own and a random tail.
    foreign_share:
        Share of the atomic facts that is set aside, out of distribution.
    inferred_ratio:
        Inferred facts in training for each in-distribution atomic fact (the paper's φ).

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
    strange: list[tuple[int, int, int, int]] = []
    for first, (head, relation, bridge) in enumerate(facts):
        for second in outgoing[bridge]:
            question = (head, entities + relation, entities + facts[second][1], facts[second][2])
            if first in foreign and second in foreign:
                strange.append(question)
            elif first not in foreign and second not in foreign:
                native.append(question)
    wanted = round(inferred_ratio * (len(facts) - len(foreign)))
    if not 0 < wanted < len(native) or not strange:
        raise ValueError(
            f"data.inferred_ratio {inferred_ratio} asks for {wanted} inferred facts in training, "
            f"expected 1 to {len(native) - 1} ({len(strange)} are out of distribution); "
            "change data.inferred_ratio, data.degree or data.foreign_share"
        )
    order = torch.randperm(len(native), generator=draw)
    inferred = torch.tensor(native)[order]
    atomic = torch.tensor([(head, entities + relation, NO_TOKEN, tail) for head, relation, tail in facts])
    train, test, strangers = torch.cat([atomic, inferred[:wanted]]), inferred[wanted:], torch.tensor(strange)
    return KnowledgeGraph(
        train[:, :3], train[:, 3], test[:, :3], test[:, 3], strangers[:, :3], strangers[:, 3], len(facts)
    )
