"""Parts of one block of pinned memory, with a block on the host in its place."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from backlight.measure.transfer import ALIGNMENT, PinnedBlock

SIZE = 64 * ALIGNMENT


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is allocated; no machine without an accelerator has pinned memory."""
    sizes: list[int] = []
    empty = torch.empty

    def unpinned(*args: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
        tensor: torch.Tensor = empty(*args, **options)  # type: ignore[call-overload]
        sizes.extend([tensor.nbytes] if pin_memory else [])
        return tensor

    monkeypatch.setattr(torch, "empty", unpinned)
    return sizes


def test_parts_do_not_overlap_and_are_lent_again(made: list[int]) -> None:
    block, draw = PinnedBlock(SIZE), random.Random(0)
    held: dict[int, torch.Tensor] = {}
    for number in range(2000):
        if len(held) > 5 or (held and draw.random() < 0.4):
            key = draw.choice(list(held))
            assert (held.pop(key) == key).all()
        held[number] = block.take((draw.randint(1, 4), draw.randint(1, 8)), torch.float64).fill_(number)
    assert all((value == key).all() for key, value in held.items())
    assert made == [SIZE]
    held.clear()
    assert block.take((SIZE,), torch.uint8).nbytes == SIZE
    assert made == [SIZE], "what was returned has not become one part again"


def test_an_array_keeps_its_part(made: list[int]) -> None:
    block = PinnedBlock(SIZE)
    array = block.take((2, 8), torch.float64).fill_(1).numpy()[0]
    gc.collect()
    others = [block.take((8,), torch.float64).fill_(2) for _ in range(62)]
    assert (array == 1).all()
    assert len(others) == 62
    assert made == [SIZE]


@pytest.mark.parametrize("shape", [(0,), (SIZE + 1,)])
def test_what_does_not_fit_has_memory_of_its_own(shape: tuple[int, ...], made: list[int]) -> None:
    assert PinnedBlock(SIZE).take(shape, torch.uint8).shape == shape
    assert made == [shape[0]]


def test_full_block_lends_no_more(made: list[int]) -> None:
    block = PinnedBlock(SIZE)
    held = [block.take((8,), torch.float64) for _ in range(65)]
    assert len({tensor.data_ptr() for tensor in held}) == 65
    assert made == [SIZE, 64]
