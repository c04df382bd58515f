"""No temporary grows with the gradients: what is allocated on the way is bounded by the size of a piece."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backlight.measure.stats.histogram import histogram
from backlight.measure.stats.kernels import SCRATCH
from backlight.measure.stats.statistics import statistics


class Peak(TorchDispatchMode):
    """Most bytes that were in use at once, of what operations handed out and was not there before."""

    def __init__(self, known):
        super().__init__()
        self.live = {t.untyped_storage().data_ptr(): 0 for t in known}
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in self.live:
                self.live[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage.data_ptr())
                self.size = max(self.size, sum(self.live.values()))
        return result


SIZE = 2**24 + 77
BOUND = 20 * 2**20
"""Bytes that a pass may take; the smallest tensor below has half as many again."""


def not_finite():
    tensor = torch.ones(SIZE)
    tensor[SIZE // 2] = float("nan")
    return tensor


TENSORS = {
    "contiguous": lambda: torch.ones(SIZE),
    "not finite": not_finite,
    "transposed": lambda: torch.ones(SIZE // 1000, 1000).t(),
    "strided": lambda: torch.ones(SIZE // 500, 1000)[:, ::2],
    "half": lambda: torch.ones(SIZE, dtype=torch.bfloat16),
    "double": lambda: torch.ones(SIZE // 2, dtype=torch.float64),
    "complex": lambda: torch.ones(SIZE // 2, dtype=torch.complex64),
    "expanded": lambda: torch.ones(1, 1).expand(2**20, 2**20),
    "needs a gradient": lambda: torch.ones(SIZE, requires_grad=True),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_statistics(kind):
    SCRATCH.drop()
    tensor = TENSORS[kind]()
    with Peak([tensor]) as peak:
        statistics([tensor], tier="eager")
    assert 0 < peak.size <= BOUND < tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("kind", [kind for kind in TENSORS if kind != "expanded"])
def test_histograms(kind):
    SCRATCH.drop()
    tensor = TENSORS[kind]()
    with Peak([tensor]) as peak:
        histogram([tensor])
    assert 0 < peak.size <= BOUND < tensor.numel() * tensor.element_size()


@pytest.mark.usefixtures("as_device")
def test_many_small_tensors():
    SCRATCH.drop()
    tensors = [torch.ones(1000) for _ in range(10_000)]
    with Peak(tensors) as peak:
        statistics(tensors, tier="eager")
    assert 0 < peak.size <= BOUND


def test_scratch_buffers_are_reused_and_small():
    tensors = [torch.randn(500_000), torch.randn(300_000, dtype=torch.float64), torch.randn(9).bfloat16()]
    statistics(tensors, tier="eager")
    before = {key: held.data_ptr() for key, held in SCRATCH._held.items()}
    assert before
    statistics(tensors, tier="eager")
    assert {key: held.data_ptr() for key, held in SCRATCH._held.items()} == before
    assert sum(held.untyped_storage().nbytes() for held in SCRATCH._held.values()) <= 16 * 2**20


def test_result_keeps_no_gradient_alive():
    tensor = torch.ones(200_000)
    pending = statistics([tensor], tier="eager")
    finalizer = []
    weakref.finalize(tensor, finalizer.append, True)
    del tensor
    assert finalizer == [True]
    assert pending.arrays()[1][0, 1] == 200_000
