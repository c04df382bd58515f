import math

import numpy as np
import pytest
import torch

from backlight.measure.stats.update import PER_TENSOR, WeightSample, stride


def weights():
    return [
        torch.nn.Parameter(torch.randn(300, 512)),
        torch.nn.Parameter(torch.randn(7)),
        torch.nn.Parameter(torch.randn(())),
        torch.nn.Parameter(torch.randn(0, 3)),
        torch.nn.Parameter(torch.randn(200, 64).t()),
        torch.nn.Parameter(torch.randn(8, 70, 5, 5).contiguous(memory_format=torch.channels_last)),
        torch.nn.Parameter(torch.randn(60, 100).bfloat16()),
        torch.nn.Parameter(torch.randn(50, 200, dtype=torch.float64)),
        torch.nn.Parameter(torch.randn(40, 300, dtype=torch.complex64)),
    ]


def step(parameters):
    """Change every weight a little; return the norms of the change and of the weights before."""
    old = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.add_(0.05 * torch.randn_like(p))
    wide = [torch.complex128 if p.is_complex() else torch.float64 for p in parameters]
    change = [
        float((p.detach().to(w) - o.to(w)).norm()) for p, o, w in zip(parameters, old, wide, strict=True)
    ]
    return change, [float(o.to(w).norm()) for o, w in zip(old, wide, strict=True)]


def test_exact_updates():
    parameters = weights()
    sample = WeightSample(parameters, per_tensor=None)
    sample.before()
    change, before = step(parameters)
    floats, integers = sample.after().arrays()
    np.testing.assert_allclose(floats, np.array([change, before]).T, rtol=1e-12)
    numel = [p.numel() for p in parameters]
    assert integers.tolist() == [[1, n, n] for n in numel]


def test_sampled_update_is_near_exact_one():
    parameters = weights()
    sample = WeightSample(parameters)
    sample.before()
    change, before = step(parameters)
    floats, integers = sample.after().arrays()
    np.testing.assert_allclose(floats, np.array([change, before]).T, rtol=0.1)
    for (measured, sampled, numel), p in zip(integers.tolist(), parameters, strict=True):
        assert measured == 1
        assert numel == p.numel()
        assert sampled == numel if numel <= PER_TENSOR else PER_TENSOR / 4 < sampled <= 2 * PER_TENSOR
    exact = [row for row, p in enumerate(parameters) if p.numel() <= PER_TENSOR]
    np.testing.assert_allclose(floats[exact], np.array([change, before]).T[exact], rtol=1e-12)


def test_update_is_zero_without_step_and_weights_are_unchanged():
    parameters = weights()
    copies = [p.detach().clone() for p in parameters]
    sample = WeightSample(parameters)
    sample.before()
    floats, _ = sample.after().arrays()
    assert not floats[:, 0].any()
    assert (floats[[0, 1, 2], 1] > 0).all()
    for parameter, copy in zip(parameters, copies, strict=True):
        assert torch.equal(parameter, copy)
        assert parameter.requires_grad
        assert parameter.grad is None


SIZES = [(768 * 768, 4096), (6000, 4096), (2**20, 1000), (6, 4), (5, 5), (97, 1), (30030 * 4, 30030), (0, 3)]


@pytest.mark.parametrize(("numel", "wanted"), SIZES)
def test_stride_has_no_factor_in_common(numel, wanted):
    step = stride(numel, wanted)
    assert step == 1 or math.gcd(step, numel) == 1
    assert -(-numel // step) <= 2 * wanted
    if numel <= wanted:
        assert step == 1


def test_sample_covers_every_column():
    parameter = torch.zeros(512, 512)
    sample = WeightSample([parameter], per_tensor=4096)
    for column in range(0, 512, 37):
        sample.before()
        parameter[:, column] += 1.0
        assert sample.after().arrays()[0][0, 0] > 0


def test_replaced_memory_is_measured():
    parameter = torch.nn.Parameter(torch.ones(100, 90))
    sample = WeightSample([parameter], per_tensor=None)
    sample.before()
    parameter.data = torch.full((100, 90), 3.0)
    np.testing.assert_allclose(sample.after().arrays()[0], [[2 * math.sqrt(9000), math.sqrt(9000)]])
    sample.before()
    parameter.data = parameter.data.t().contiguous().t() + 1
    np.testing.assert_allclose(sample.after().arrays()[0], [[math.sqrt(9000), 3 * math.sqrt(9000)]])


def test_same_memory_with_other_strides():
    parameter = torch.nn.Parameter(torch.randn(30, 30))
    change = float((parameter.detach().t() - parameter.detach()).double().norm())
    sample = WeightSample([parameter], per_tensor=None)
    sample.before()
    parameter.data = parameter.data.t()
    np.testing.assert_allclose(sample.after().arrays()[0][0, 0], change, rtol=1e-6)


def test_type_that_changes_between_steps_and_within_one():
    parameter = torch.nn.Parameter(torch.ones(100, 90))
    sample = WeightSample([parameter])
    sample.before()
    parameter.data = parameter.data.to(torch.bfloat16) * 2
    np.testing.assert_allclose(sample.after().arrays()[0], [[math.sqrt(9000)] * 2])
    sample.before()
    parameter.data = parameter.data.to(torch.float64) * 2
    np.testing.assert_allclose(sample.after().arrays()[0], [[2 * math.sqrt(9000)] * 2])


def test_weights_of_another_shape_or_device_are_not_measured():
    resized = torch.nn.Parameter(torch.ones(10))
    freed = torch.ones(5)
    kept = torch.ones(4)
    sample = WeightSample([resized, torch.arange(3), freed, kept, torch.ones(2, device="meta")])
    sample.before()
    resized.data = torch.ones(11)
    freed.untyped_storage().resize_(0)
    floats, integers = sample.after().arrays()
    assert integers.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 4, 4], [0, 0, 0]]
    assert floats.tolist() == [[0, 0], [0, 0], [0, 0], [0, 2], [0, 0]]


def test_after_without_before_measures_nothing():
    floats, integers = WeightSample([torch.ones(3)]).after().arrays()
    assert integers.tolist() == [[0, 0, 0]]
    assert floats.tolist() == [[0.0, 0.0]]
    assert WeightSample([]).after().arrays()[0].shape == (0, 2)


def test_local_part_is_read_each_time():
    parts = {"now": torch.ones(4)}
    handle = torch.empty(100)
    sample = WeightSample([handle], local=lambda tensor: parts["now"])
    sample.before()
    parts["now"] = torch.full((4,), 2.0)
    assert sample.after().arrays()[0].tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("value", [1e20, 1e-30])
def test_magnitudes_whose_squares_fp32_cannot_hold(value):
    parameter = torch.full((300,), value)
    sample = WeightSample([parameter])
    sample.before()
    parameter.mul_(2)
    np.testing.assert_allclose(sample.after().arrays()[0], [[value * math.sqrt(300)] * 2], rtol=1e-6)


def test_update_that_is_not_finite():
    parameter = torch.ones(5)
    sample = WeightSample([parameter])
    sample.before()
    parameter[0] = math.nan
    floats, _ = sample.after().arrays()
    assert math.isnan(floats[0, 0])
    assert floats[0, 1] == pytest.approx(math.sqrt(5))
