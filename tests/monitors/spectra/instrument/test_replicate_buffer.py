"""Replicates that wait: parts of one backward add up, what does not fit is left, all ranks decide alike."""

from __future__ import annotations

import pytest
import torch

from backlight.monitors.spectra.instrument.batch_split import split
from backlight.monitors.spectra.instrument.rank_exchange import Offer, agreed, common
from backlight.monitors.spectra.instrument.replicate_buffer import Target, Waiting, copied, fitting
from backlight.monitors.spectra.instrument.shared_step import owners
from backlight.store.format.spectra import Layer


def target(key: int, rows: int, columns: int = 4) -> Target:
    name = f"w{key}"
    layer = Layer(name, "", (rows, columns), "", rows, columns, key)
    return Target(key, name, (layer,), 4 * rows * columns)


def test_parts_of_one_backward_add_up_and_copies_are_ours() -> None:
    waiting = Waiting([target(0, 2)], 1000, 9, "host")
    gradient = torch.ones(2, 4)
    assert waiting.begin()
    waiting.take(0, gradient)
    waiting.take(0, 2 * gradient)
    gradient.zero_()
    waiting.end(whole=True, samples=5)
    caught = waiting.caught(7)
    assert (caught.step, caught.samples) == (7, [5])
    assert torch.equal(caught.replicates["w0"][0], torch.full((2, 4), 3.0))


def test_a_budget_of_bytes_and_a_number_of_replicates_bound_what_is_kept() -> None:
    for budget, most, kept in ((3 * 32, 9, 3), (1000, 2, 2)):
        waiting = Waiting([target(0, 2)], budget, most, "host")
        for _ in range(5):
            if waiting.begin():
                waiting.take(0, torch.ones(2, 4))
                waiting.end(whole=True, samples=None)
        caught = waiting.caught(0)
        assert (len(caught.replicates["w0"]), caught.cut) == (kept, 5 - kept)


def test_what_a_replicate_lacks_is_named_and_a_broken_one_is_let_go() -> None:
    waiting = Waiting([target(0, 2), target(1, 2)], 10_000, 9, "host")
    for keys, whole in (((0, 1), True), ((0,), True), ((0, 1), False)):
        waiting.begin()
        for key in keys:
            waiting.take(key, torch.ones(2, 4))
        waiting.end(whole=whole, samples=None)
    caught = waiting.caught(0)
    assert {name: len(parts) for name, parts in caught.replicates.items()} == {"w0": 2}
    assert caught.lacking == {"w1": "no gradient in 1 of 2 microbatches"}
    assert waiting.broken == 1


def test_the_largest_that_fit_are_taken() -> None:
    chosen = fitting([target(0, 2), target(1, 50), target(2, 8)], 2, 2 * (32 + 128))
    assert [t.name for t in chosen] == ["w2", "w0"]


def test_sparse_and_expanded_gradients_are_copied_whole() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(copied(sparse, "host"), torch.eye(3))
    expanded = torch.ones(1).expand(3, 4)
    assert copied(expanded, "host").is_contiguous()


def test_all_ranks_drop_what_one_lacks_or_has_otherwise() -> None:
    kind = ("torch.float32", (2, 4))
    one = Offer(0, {"a": 2, "b": 2, "c": 2}, dict.fromkeys("abc", kind), owners={"a": 0, "b": 1, "c": 0})
    other = Offer(
        0, {"a": 2, "c": 1}, {"a": kind, "c": ("torch.bfloat16", (2, 4))}, owners={"a": 1, "c": 1, "d": 1}
    )
    assert agreed([one, other]) == {"a": 0, "b": 1, "c": 0, "d": 1}
    together, dropped = common([one, other], agreed([one, other]))
    assert together == ("a",)
    assert dropped == {
        "b": "no whole set of gradients on rank 1",
        "c": "its gradients have another type or shape on some ranks",
        "d": "no whole set of gradients on rank 0, 1",
    }


def test_layers_are_dealt_out_by_cost() -> None:
    assert owners([target(0, 2), target(1, 50), target(2, 8)], 2) == {"w1": 0, "w2": 1, "w0": 1}


def test_a_batch_is_split_into_equal_parts() -> None:
    parts = split({"x": torch.arange(10), "mask": None, "scale": torch.tensor(2.0)}, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert all(part["scale"] == 2.0 for part in parts)
    with pytest.raises(ValueError, match="a batch of 2 samples cannot be split into 3 replicates"):
        split((torch.zeros(2, 5),), 3)
