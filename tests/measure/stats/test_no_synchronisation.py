"""On an accelerator no value is read by the host, and nothing is copied more than once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backlight.measure import transfer
from backlight.measure.stats import histogram as histogram_module
from backlight.measure.stats import statistics as statistics_module
from backlight.measure.stats import update
from backlight.measure.stats.histogram import histogram
from backlight.measure.stats.statistics import statistics
from backlight.measure.stats.update import WeightSample

READS = (
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "equal",
    "unique",
    "bincount",
    "masked_select",
    "_coalesce",
)
"""Operations whose result, or whose shape, the host must wait for."""


class Recorded(TorchDispatchMode):
    """Names of the operations that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))

    def reads(self):
        return [name for name in self.names if name in READS]


@pytest.fixture
def sent(monkeypatch):
    """The tables whose copy to the host was started."""
    tables = []
    original = transfer.start_copy

    def start_copy(table):
        tables.append(table)
        return original(table)

    for module in (transfer, statistics_module, histogram_module, update):
        monkeypatch.setattr(module, "start_copy", start_copy)
    return tables


@pytest.mark.usefixtures("as_device")
def test_statistics_copy_once_without_synchronisation(sent, kinds, check):
    tensors, scale = kinds, torch.tensor(1.0)
    with Recorded() as recorded:
        pending = statistics(tensors, tier="eager", scale=scale)
    assert recorded.names
    assert recorded.reads() == []
    assert len(sent) == 1
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
def test_histogram_copies_once_without_synchronisation(sent, kinds):
    with Recorded() as recorded:
        pending = histogram(kinds, scale=torch.tensor(2.0))
    assert recorded.names
    assert recorded.reads() == []
    assert len(sent) == 1
    assert pending.arrays()[1][0].sum() == 1 + 300 * 500


@pytest.mark.usefixtures("as_device")
def test_update_copies_once_without_synchronisation(sent):
    weights = [torch.randn(300, 500), torch.randn(40, 30).t(), torch.randn(7)]
    sample = WeightSample(weights)
    with Recorded() as recorded:
        sample.before()
        pending = sample.after()
    assert recorded.reads() == []
    assert len(sent) == 1
    assert pending.arrays()[1][:, 0].tolist() == [1, 1, 1]
