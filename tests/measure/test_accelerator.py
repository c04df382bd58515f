"""Equal numbers on a CUDA device, without synchronisation."""

import numpy as np
import pytest
import torch

from backlight.measure.stats.histogram import histogram
from backlight.measure.stats.statistics import statistics
from backlight.measure.stats.update import WeightSample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


@pytest.fixture
def unsynchronised():
    """Make synchronisation an error after one warm-up call."""

    def run(measure):
        measure().arrays()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return measure()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return run


def test_statistics(unsynchronised, kinds, check):
    tensors = [None if t is None else t.cuda() for t in kinds]
    scale = torch.ones((), device="cuda")
    pending = unsynchronised(lambda: statistics(tensors, scale=scale))
    check(pending, tensors)
    assert pending.ready()


def test_histograms(unsynchronised, kinds):
    tensors = [None if t is None else t.cuda() for t in kinds]
    found = unsynchronised(lambda: histogram(tensors)).arrays()[1]
    np.testing.assert_array_equal(found, histogram(kinds).arrays()[1])


def test_updates(unsynchronised):
    weights = [torch.randn(300, 512, device="cuda"), torch.randn(7, device="cuda", dtype=torch.bfloat16)]
    sample = WeightSample(weights, per_tensor=None)

    def step():
        sample.before()
        for weight in weights:
            weight.mul_(2)
        return sample.after()

    floats, integers = unsynchronised(step).arrays()
    np.testing.assert_allclose(floats[:, 0], floats[:, 1], rtol=1e-12)
    assert integers[:, 0].tolist() == [1, 1]
