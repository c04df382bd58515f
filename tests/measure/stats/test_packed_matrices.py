"""Chunks are views where possible; copies are bounded."""

import pytest
import torch

from backlight.measure.stats.packed_matrices import add_duplicates, chunks, matrices, stored


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 5),
        torch.randn(4, 5).t(),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(3, 1, 4).permute(2, 1, 0),
        torch.randn(9)[2:],
    ],
)
def test_dense_memory_is_viewed(tensor):
    values, times = stored(tensor)
    assert times == 1
    assert values.is_contiguous()
    assert values.data_ptr() == tensor.data_ptr()
    assert sorted(values.flatten().tolist()) == sorted(tensor.flatten().tolist())


def test_repeated_memory_is_read_once():
    values, times = stored(torch.randn(1, 6, 1).expand(5, 6, 7))
    assert (values.numel(), times) == (6, 35)


def test_scattered_memory_is_copied_in_bounded_chunks():
    tensor = torch.arange(3 * 40 * 50.0).view(3, 40, 50)[:, 1:, ::2]
    found = list(chunks(stored(tensor).values, 64))
    assert max(chunk.numel() for chunk in found) <= 64
    assert all(chunk.dim() == 1 for chunk in found)
    assert sorted(torch.cat(found).tolist()) == sorted(tensor.flatten().tolist())


def test_chunks_of_dense_memory_are_views():
    tensor = torch.randn(1000)
    found = list(chunks(tensor, 300))
    assert [chunk.numel() for chunk in found] == [300, 300, 300, 100]
    assert all(p.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for p in found)


@pytest.mark.parametrize(("threads", "below"), [(1, 2**18 + 1), (4, 2**15)])
def test_packed_matrices_stay_single_threaded(threads, below, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    values = [(i, torch.ones(size)) for i, size in enumerate([5, 0, 20_000, 30_000, 131_071, 600_001, 300])]
    found = list(matrices(values))
    assert max(matrix.rows.numel() for matrix in found) < below
    owned = dict.fromkeys(range(len(values)), 0)
    for matrix in matrices(values):
        per_row = matrix.rows.sum(1)
        assert len(per_row) == sum(rows for _, rows in matrix.owners)
        for owner, rows in matrix.owners:
            owned[owner] += int(per_row[:rows].sum())
            per_row = per_row[rows:]
    assert owned == {i: tensor.numel() for i, tensor in values}


@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 2, 4)])
@pytest.mark.parametrize("dense", [(), (3,)])
def test_duplicates_are_added_like_torch_does(shape, dense):
    indices = torch.stack([torch.randint(0, size, (40,)) for size in shape])
    values = torch.randint(-5, 5, (40, *dense)).float()
    tensor = torch.sparse_coo_tensor(indices, values, (*shape, *dense), check_invariants=True)
    expected = tensor.coalesce().values()
    found = add_duplicates(tensor)
    assert found.shape == values.shape
    assert torch.equal(found[: len(expected)], expected)
    assert not found[len(expected) :].any()
