"""Dispatched operations: bounded temporaries, and on an accelerator no synchronisation and one copy."""

import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backlight.measure import transfer
from backlight.measure.stats import histogram as histogram_module
from backlight.measure.stats import statistics as statistics_module
from backlight.measure.stats import update
from backlight.measure.stats.histogram import histogram
from backlight.measure.stats.kernels import SCRATCH
from backlight.measure.stats.statistics import statistics
from backlight.measure.stats.update import WeightSample


class Peak(TorchDispatchMode):
    """Peak number of bytes of new storages returned by operations."""

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
"""Bytes that a pass may allocate; every tensor below is larger."""


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


MEASURES = {"statistics": partial(statistics, tier="eager"), "histogram": histogram}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measure", "kind"), [(m, k) for m in MEASURES for k in TENSORS if (m, k) != ("histogram", "expanded")]
)
def test_temporaries_are_bounded(measure, kind):
    SCRATCH.drop()
    tensor = TENSORS[kind]()
    with Peak([tensor]) as peak:
        MEASURES[measure]([tensor])
    assert 0 < peak.size <= BOUND < tensor.numel() * tensor.element_size()


@pytest.mark.slow
@pytest.mark.usefixtures("as_device")
def test_temporaries_of_many_small_tensors_are_bounded():
    SCRATCH.drop()
    tensors = [torch.ones(1000) for _ in range(10_000)]
    with Peak(tensors) as peak:
        statistics(tensors, tier="eager")
    assert 0 < peak.size <= BOUND


def test_scratch_buffers_are_reused_and_small():
    tensors = [torch.randn(500_000), torch.randn(300_000, dtype=torch.float64), torch.randn(9).bfloat16()]
    statistics(tensors, tier="eager")
    before = {key: held.data_ptr() for key, held in SCRATCH._buffers.items()}
    assert before
    statistics(tensors, tier="eager")
    assert {key: held.data_ptr() for key, held in SCRATCH._buffers.items()} == before
    assert sum(held.untyped_storage().nbytes() for held in SCRATCH._buffers.values()) <= 16 * 2**20


def test_result_keeps_no_gradient_alive():
    tensor = torch.ones(200_000)
    pending = statistics([tensor], tier="eager")
    finalizer = []
    weakref.finalize(tensor, finalizer.append, True)
    del tensor
    assert finalizer == [True]
    assert pending.arrays()[1][0, 1] == 200_000


READS = (
    "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "unique", "bincount", "masked_select",
    "_coalesce",
)  # fmt: skip
"""Operations whose result or shape makes the host wait."""


class Recorded(TorchDispatchMode):
    """Names of the dispatched operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))

    def reads(self):
        return [name for name in self.names if name in READS]


@pytest.fixture
def copied_tables(monkeypatch):
    """Record the tables whose copy to the host was started."""
    tables = []
    original = transfer.start_copy

    def start_copy(table):
        tables.append(table)
        return original(table)

    for module in (transfer, statistics_module, histogram_module, update):
        monkeypatch.setattr(module, "start_copy", start_copy)
    return tables


@pytest.mark.slow
@pytest.mark.usefixtures("as_device")
def test_statistics_copy_once_without_synchronisation(copied_tables, kinds, check):
    tensors, scale = kinds, torch.tensor(1.0)
    with Recorded() as recorded:
        pending = statistics(tensors, tier="eager", scale=scale)
    assert recorded.names
    assert recorded.reads() == []
    assert len(copied_tables) == 1
    check(pending, tensors)


def test_host_counts_only_non_finite_tensors():
    finite = [torch.randn(300), torch.randn(200_000)]
    with Recorded() as recorded:
        statistics(finite, tier="eager")
    assert "isnan" not in recorded.names
    with Recorded() as recorded:
        statistics([*finite, torch.tensor([float("nan")])], tier="eager")
    assert recorded.names.count("isnan") + recorded.names.count("ne") <= 6


@pytest.mark.usefixtures("as_device")
def test_histogram_copies_once_without_synchronisation(copied_tables, kinds):
    with Recorded() as recorded:
        pending = histogram(kinds, scale=torch.tensor(2.0))
    assert recorded.names
    assert recorded.reads() == []
    assert len(copied_tables) == 1
    assert pending.arrays()[1][0].sum() == 1 + 300 * 500


@pytest.mark.usefixtures("as_device")
def test_update_copies_once_without_synchronisation(copied_tables):
    weights = [torch.randn(300, 500), torch.randn(40, 30).t(), torch.randn(7)]
    sample = WeightSample(weights)
    with Recorded() as recorded:
        sample.before()
        pending = sample.after()
    assert recorded.reads() == []
    assert len(copied_tables) == 1
    assert pending.arrays()[1][:, 0].tolist() == [1, 1, 1]
