"""Data sets: tables, splits, the control, graphs, images."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from backlight.experiments.data.algorithmic import (
    NO_TOKEN,
    OPERATIONS,
    knowledge_graph,
    modular_table,
    one_hot_pairs,
    permutation_table,
    unordered,
)
from backlight.experiments.data.split import (
    apply_control,
    derived_seed,
    draw_split,
    generator,
    image_split,
    linear_teacher,
    load_images,
    seeded,
)
from backlight.experiments.published.doshi import Data as Polynomial
from backlight.experiments.published.doshi import polynomial_table

PLAIN = {
    "add": lambda a, b, p: (a + b) % p,
    "subtract": lambda a, b, p: (a - b) % p,
    "multiply": lambda a, b, p: a * b % p,
    "divide": lambda a, b, p: a * pow(b, -1, p) % p,
    "squares": lambda a, b, p: (a**2 + b**2) % p,
}


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_modular_tables_equal_integer_arithmetic(operation):
    pairs, results = modular_table(13, operation)
    expected = [PLAIN[operation](a, b, 13) for a, b in pairs.tolist()]
    assert results.tolist() == expected
    assert len(set(map(tuple, pairs.tolist()))) == len(pairs) == (13 * 12 if operation == "divide" else 169)


def test_impossible_tables_are_refused():
    with pytest.raises(ValueError, match="expected one of add"):
        modular_table(7, "power")
    with pytest.raises(ValueError, match="p is 9, expected a prime"):
        modular_table(9, "divide")


def test_permutations_of_five_are_group():
    pairs, results = permutation_table(5)
    assert len(pairs) == 14_400
    table = results.view(120, 120)
    elements = list(itertools.permutations(range(5)))
    for a, b in ((3, 77), (119, 5), (60, 60)):
        assert elements[table[a, b]] == tuple(elements[a][x] for x in elements[b])
    every = torch.arange(120)
    assert torch.equal(table[0], every)  # 0 is the identity
    assert torch.equal(table[:, 0], every)
    assert torch.equal(table.sort(0).values, every[:, None].expand(120, 120))  # a Latin square
    assert torch.equal(table.sort(1).values, every.expand(120, 120))
    a, b, c = torch.randint(120, (3, 500), generator=torch.Generator().manual_seed(1))
    assert torch.equal(table[table[a, b], c], table[a, table[b, c]])
    assert not torch.equal(table, table.T)


def test_split_is_disjoint_complete_and_seeded():
    pairs, results = modular_table(11, "add")
    split = draw_split(pairs, results, 40, seed=3)
    train, test = (set(map(tuple, x.tolist())) for x in (split.train_inputs, split.test_inputs))
    assert len(train) == 40
    assert not train & test
    assert train | test == set(map(tuple, pairs.tolist()))
    assert torch.equal(split.test_inputs.sum(1) % 11, split.test_labels)
    assert torch.equal(split.train_inputs, draw_split(pairs, results, 40, seed=3).train_inputs)
    assert not torch.equal(split.train_inputs, draw_split(pairs, results, 40, seed=4).train_inputs)
    with pytest.raises(ValueError, match="train_size is 121, expected 1 to 120"):
        draw_split(pairs, results, 121, seed=3)


def test_control_shuffles_labels_only():
    pairs, results = modular_table(11, "add")
    split = draw_split(pairs, results, 60, seed=0)
    control = apply_control(split, "random-labels", 0)
    assert torch.equal(control.train_inputs, split.train_inputs)
    assert torch.equal(control.test_inputs, split.test_inputs)
    for shuffled, labels in (
        (control.train_labels, split.train_labels),
        (control.test_labels, split.test_labels),
    ):
        assert torch.equal(shuffled.sort().values, labels.sort().values)
        assert (shuffled == labels).float().mean() < 0.4
    assert torch.equal(apply_control(split, "random-labels", 0).train_labels, control.train_labels)
    assert apply_control(split, "", 0) is split
    with pytest.raises(ValueError, match="control is 'shuffled', expected one of '', 'random-labels'"):
        apply_control(split, "shuffled", 0)


def test_random_streams_depend_on_seed_and_purpose_only():
    assert derived_seed(0, "a") != derived_seed(0, "b") != derived_seed(1, "b")
    state = torch.get_rng_state()
    with seeded(5, "model"):
        first = torch.rand(3)
    torch.rand(7)
    with seeded(5, "model"):
        assert torch.equal(torch.rand(3), first)
    torch.set_rng_state(state)
    assert torch.equal(torch.rand(2, generator=generator(1, "x")), torch.rand(2, generator=generator(1, "x")))


def test_unordered_pairs_have_no_mirror_image():
    pairs, results = unordered(*modular_table(7, "multiply"))
    assert len(pairs) == 28
    assert len({tuple(sorted(pair)) for pair in pairs.tolist()}) == 28
    assert results.tolist() == [a * b % 7 for a, b in pairs.tolist()]
    with pytest.raises(ValueError, match="the operation is not commutative"):
        unordered(*modular_table(7, "subtract"))
    with pytest.raises(ValueError, match="the operation is not commutative"):
        unordered(*modular_table(7, "divide"))


def test_one_hot_pairs():
    encoded = one_hot_pairs(torch.tensor([[1, 2]]), 3)
    assert encoded.tolist() == [[0, 1, 0, 0, 0, 1]]


def test_polynomials_equal_integer_arithmetic():
    tuples, values = polynomial_table(Polynomial(p=5, coefficients=(2, 1, 3), exponents=(2, 1, 3)))
    assert len(tuples) == 125
    assert values.tolist() == [(2 * a**2 + b + 3 * c**3) % 5 for a, b, c in tuples.tolist()]
    with pytest.raises(ValueError, match="expected as many of both"):
        polynomial_table(Polynomial(coefficients=(1, 1), exponents=(1,)))


def test_knowledge_graph_is_consistent_without_leaks():
    graph = knowledge_graph(30, 6, 5, 0.1, 2.0, seed=0)
    atomic = graph.split.train_inputs[: graph.atomic]
    assert graph.atomic == 150
    assert (atomic[:, 2] == NO_TOKEN).all()
    tails = graph.split.train_labels[: graph.atomic].tolist()
    facts = {(h, r): t for (h, r, _), t in zip(atomic.tolist(), tails, strict=True)}
    assert len(facts) == 150
    inferred = graph.split.train_inputs[graph.atomic :]
    groups = {
        "train": (inferred, graph.split.train_labels[graph.atomic :]),
        "test": (graph.split.test_inputs, graph.split.test_labels),
        "foreign": (graph.foreign_questions, graph.foreign_answers),
    }
    used: dict[str, set] = {}
    for name, (questions, answers) in groups.items():
        used[name] = set()
        for (h, r1, r2), t in zip(questions.tolist(), answers.tolist(), strict=True):
            bridge = facts[h, r1]
            assert facts[bridge, r2] == t
            used[name] |= {(h, r1), (bridge, r2)}
    assert len(inferred) == 2 * 135
    assert not used["train"] & used["foreign"]
    assert not used["test"] & used["foreign"]
    assert used["foreign"]
    train, test, _ = (set(map(tuple, questions.tolist())) for questions, _ in groups.values())
    assert not train & test
    with pytest.raises(ValueError, match=r"data\.inferred_ratio 90"):
        knowledge_graph(30, 6, 5, 0.1, 90, seed=0)
    with pytest.raises(ValueError, match=r"data\.degree is 7, expected 1 to 6"):
        knowledge_graph(30, 6, 7, 0.1, 2, seed=0)


def test_targets_are_those_of_teacher():
    split, teacher = linear_teacher(20, 3, 15, 8, seed=0)
    assert torch.allclose(split.train_inputs @ teacher.T, split.train_labels)
    assert torch.allclose(split.test_inputs @ teacher.T, split.test_labels)
    assert split.train_inputs.shape == (15, 20)


@pytest.mark.slow
def test_digits_replace_images_and_are_disjoint():
    pytest.importorskip("sklearn")
    split = image_split("", 100, 50, seed=0)
    assert split.train_inputs.shape == (100, 64)
    assert split.test_inputs.shape == (50, 64)
    assert 0 <= split.train_inputs.min() <= split.train_inputs.max() <= 1
    whole = image_split("", 1000, 0, seed=0)
    assert len(whole.train_inputs) + len(whole.test_inputs) == 1797
    with pytest.raises(ValueError, match=r"data.train_size is 1797, but there are 1797 images"):
        image_split("", 1797, 0, seed=0)


def test_file_of_images_is_read_or_refused(tmp_path):
    draw = np.random.default_rng(0)
    arrays = {
        "x_train": draw.integers(0, 256, (12, 4, 4), dtype=np.uint8),
        "y_train": draw.integers(0, 10, 12, dtype=np.uint8),
        "x_test": draw.integers(0, 256, (5, 4, 4), dtype=np.uint8),
        "y_test": draw.integers(0, 10, 5, dtype=np.uint8),
    }
    path = tmp_path / "images.npz"
    np.savez(path, **arrays)
    train, labels, _, _ = load_images(str(path))
    assert torch.allclose(train, torch.from_numpy(arrays["x_train"].reshape(12, 16) / 255).float())
    assert labels.tolist() == arrays["y_train"].tolist()
    split = image_split(str(path), 8, 0, seed=0)
    assert (len(split.train_inputs), len(split.test_inputs)) == (8, 5)
    np.savez(path, x_train=arrays["x_train"])
    with pytest.raises(ValueError, match="no array y_train, x_test, y_test"):
        load_images(str(path))
    with pytest.raises(FileNotFoundError, match=r"expected an \.npz file"):
        load_images(str(tmp_path / "none.npz"))
