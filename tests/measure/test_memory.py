"""No temporary grows with the gradients: what is allocated on the way is bounded by the size of a piece."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backlight.measure.histogram import histogram
from backlight.measure.rows import SCRATCH
from backlight.measure.statistics import statistics


class Largest(TorchDispatchMode):
    """Size in bytes of the largest memory that any operation handed out and that was not there before."""

    def __init__(self, known):
        super().__init__()
        self.known = {self.place(t) for t in known}
        self.size = 0

    @staticmethod
    def place(tensor):
        return tensor.untyped_storage().data_ptr()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and self.place(tensor) not in self.known:
                self.size = max(self.size, tensor.untyped_storage().nbytes())
        return result


SIZE = 2**22 + 77
BAD = torch.ones(SIZE)
BAD[SIZE // 2] = float("nan")

TENSORS = {
    "contiguous": torch.ones(SIZE),
    "not finite": BAD,
    "transposed": torch.ones(SIZE // 1000, 1000).t(),
    "strided": torch.ones(SIZE // 500, 1000)[:, ::2],
    "half": torch.ones(SIZE, dtype=torch.bfloat16),
    "double": torch.ones(SIZE, dtype=torch.float64),
    "complex": torch.ones(SIZE, dtype=torch.complex64),
    "expanded": torch.ones(1, 1).expand(2**20, 2**20),
    "needs a gradient": torch.ones(SIZE, requires_grad=True),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_statistics(kind):
    with Largest([TENSORS[kind]]) as largest:
        statistics([TENSORS[kind]], tier="eager")
    assert 0 < largest.size <= 8 * 2**20  # a piece of 2^18, in float64 and twice where it is complex


@pytest.mark.usefixtures("as_device")
def test_many_small_tensors():
    tensors = [torch.ones(1000) for _ in range(4000)]
    with Largest(tensors) as largest:
        statistics(tensors, tier="eager")
    assert 0 < largest.size <= 4 * 2**20


@pytest.mark.parametrize("kind", [kind for kind in TENSORS if kind != "expanded"])
def test_histograms(kind):
    with Largest([TENSORS[kind]]) as largest:
        histogram([TENSORS[kind]])
    assert 0 < largest.size <= 4 * 2**20


def test_buffers_stay_and_stay_small():
    statistics(list(TENSORS.values()), tier="eager")
    before = {key: held.data_ptr() for key, held in SCRATCH._held.items()}
    assert before
    statistics(list(TENSORS.values()), tier="eager")
    assert {key: held.data_ptr() for key, held in SCRATCH._held.items()} == before
    assert sum(held.untyped_storage().nbytes() for held in SCRATCH._held.values()) <= 16 * 2**20


def test_a_result_keeps_no_gradient_alive():
    tensor = torch.ones(200_000)
    pending = statistics([tensor], tier="eager")
    finalizer = []
    import weakref

    weakref.finalize(tensor, finalizer.append, True)
    del tensor
    assert finalizer == [True]
    assert pending.arrays()[1][0, 1] == 200_000
