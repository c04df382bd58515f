"""Each condition on a injected fault and on its control, measured by the functions themselves."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from backlight.measure.spectra.measurement import spectral_echo
from backlight.measure.spectra.shrinkage import threshold
from backlight.monitors.spectra.model.conditions import (
    batch_far_from_critical,
    below_noise,
    modes_too_close,
    rank_collapse,
)


def measured(R, ratios, p=60, q=90):
    torch.manual_seed(1)
    s = torch.tensor(ratios) * threshold(1.0, p, q)
    U, V = (torch.linalg.qr(torch.randn(n, len(ratios)))[0] for n in (p, q))
    return spectral_echo((U * s) @ V.T + torch.randn(R, p, q))


HEALTHY = measured(16, [12.0, 6.0, 3.0])


def test_a_layer_below_the_noise():
    noise = measured(16, [0.5])
    found = below_noise(noise.identifiable, np.median(noise.singular_values[:, 0]), noise.noise.edge)
    assert found is not None
    assert found.value == pytest.approx(found.bound, rel=0.05)
    assert below_noise(HEALTHY.identifiable, HEALTHY.singular_value[0], HEALTHY.noise.edge) is None


def test_modes_too_close():
    together = modes_too_close(measured(16, [6.0, 5.95, 2.5]).blocks)
    assert together is not None
    assert (together.directions, together.value) == ((0, 1), 2)
    assert modes_too_close(HEALTHY.blocks) is None


@pytest.mark.parametrize(
    ("batch", "scale", "expected"),
    [(1000, 99, 1000 / 99), (10, 101, 10 / 101), (1000, 101, None), (10, 99, None), (8, math.inf, 0.0),
     (8, 0.0, math.inf), (8, math.nan, None)],
)  # fmt: skip
def test_batch_and_noise_scale(batch, scale, expected):
    found = batch_far_from_critical(batch, scale)
    assert (found.value if found else None) == expected


@pytest.mark.parametrize(
    ("rank", "earlier", "collapsed"),
    [(1.1, [20, 30, 25], True), (1.1, [1.2, 1.3], False), (5.0, [40.0], False), (1.1, [], False),
     (None, [20], False), (math.nan, [20], False), (1.1, [math.nan], False)],
)  # fmt: skip
def test_collapse_of_rank(rank, earlier, collapsed):
    assert (rank_collapse(rank, earlier) is not None) == collapsed


def test_conditions_need_no_torch():
    code = "import sys, backlight.monitors.spectra.model.conditions\nassert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
