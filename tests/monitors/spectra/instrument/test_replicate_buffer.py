"""Replicate buffers: one backward adds up, the budget holds."""

from __future__ import annotations

import pytest
import torch

from backlight.capture.batches import split
from backlight.monitors.spectra.instrument.replicate_buffer import ReplicateBuffer, Target, copied, fitting
from backlight.store.spectra import Layer


def target(key: int, rows: int, columns: int = 4) -> Target:
    name = f"w{key}"
    layer = Layer(name, "", (rows, columns), "", rows, columns, key)
    return Target(key, name, (layer,), 4 * rows * columns)


def test_gradients_of_one_backward_add_up_and_are_copied() -> None:
    buffer = ReplicateBuffer([target(0, 2)], 1000, 9, "host")
    gradient = torch.ones(2, 4)
    assert buffer.begin()
    buffer.add(0, gradient)
    buffer.add(0, 2 * gradient)
    gradient.zero_()
    buffer.end(complete=True, samples=5)
    captured = buffer.captured(7)
    assert (captured.step, captured.samples) == (7, [5])
    assert torch.equal(captured.replicates["w0"][0], torch.full((2, 4), 3.0))


def test_bytes_and_number_of_replicates_are_bounded() -> None:
    for budget, most, kept in ((3 * 32, 9, 3), (1000, 2, 2)):
        buffer = ReplicateBuffer([target(0, 2)], budget, most, "host")
        for _ in range(5):
            if buffer.begin():
                buffer.add(0, torch.ones(2, 4))
                buffer.end(complete=True, samples=None)
        captured = buffer.captured(0)
        assert (len(captured.replicates["w0"]), captured.dropped) == (kept, 5 - kept)


def test_missing_gradients_are_reported_and_failed_replicates_discarded() -> None:
    buffer = ReplicateBuffer([target(0, 2), target(1, 2)], 10_000, 9, "host")
    for keys, whole in (((0, 1), True), ((0,), True), ((0, 1), False)):
        buffer.begin()
        for key in keys:
            buffer.add(key, torch.ones(2, 4))
        buffer.end(complete=whole, samples=None)
    captured = buffer.captured(0)
    assert {name: len(parts) for name, parts in captured.replicates.items()} == {"w0": 2}
    assert captured.lacking == {"w1": "no gradient in 1 of 2 microbatches"}
    assert buffer.failed == 1


def test_largest_targets_that_fit_are_selected() -> None:
    chosen = fitting([target(0, 2), target(1, 50), target(2, 8)], 2, 2 * (32 + 128))
    assert [t.name for t in chosen] == ["w2", "w0"]


def test_sparse_and_expanded_gradients_are_copied_whole() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(copied(sparse, "host"), torch.eye(3))
    expanded = torch.ones(1).expand(3, 4)
    assert copied(expanded, "host").is_contiguous()


def test_batch_is_split_into_equal_parts() -> None:
    parts = split({"x": torch.arange(10), "mask": None, "scale": torch.tensor(2.0)}, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert all(part["scale"] == 2.0 for part in parts)
    with pytest.raises(ValueError, match="a batch of 2 samples cannot be split into 3 replicates"):
        split((torch.zeros(2, 5),), 3)
