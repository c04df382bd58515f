"""``collect`` and ``collect_groups``."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn

import backlight
from backlight.monitors.health.instrument.collect import CollectLimits


def net(*gradients: torch.Tensor | None) -> list[nn.Parameter]:
    """Parameters with the given gradients."""
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(3) if gradient is None else torch.zeros_like(gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def test_values_match_torch() -> None:
    gradients = [torch.randn(4, 5), torch.randn(7), torch.randn(2, 2, 2, dtype=torch.float64)]
    result = backlight.collect(net(*gradients)).result()
    assert result.measured
    assert result.total_norm == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-6)
    assert result.health == 1.0
    assert (result.vanishing, result.exploding, result.non_finite) == (0, 0, 0)
    for values, gradient in zip(result.values, gradients, strict=True):
        assert values.norm == pytest.approx(float(gradient.double().norm()), rel=1e-7)
        assert values.rms == pytest.approx(float(gradient.double().square().mean().sqrt()), rel=1e-7)
        assert values.mean == pytest.approx(float(gradient.double().mean()), rel=1e-7)
        assert values.max_abs == pytest.approx(float(gradient.abs().max()), rel=1e-7)


def test_empty_input_is_not_measured() -> None:
    for pending in (backlight.collect([]), backlight.collect_groups({}), backlight.collect(net(None))):
        result = pending.result()
        assert isinstance(pending, backlight.Pending)
        assert not result.measured
        assert result.health is None
        assert math.isnan(result.total_norm)


@pytest.mark.parametrize(
    ("gradients", "clip_norm", "counts", "health"),
    [
        ([torch.full((10,), 1e-12), *(torch.ones(10) for _ in range(3))], None, (1, 0, 0), 1 - 0.5 / 4),
        ([torch.full((4,), 1e-12), torch.full((9,), 1e-12)], None, (2, 0, 0), 0.5),
        ([torch.full((4,), 40.0)], None, (0, 0, 0), 1.0),
        ([torch.full((4,), 40.0)], 1.0, (0, 1, 0), 0.2),
        ([torch.full((4,), 1e7), torch.full((4,), 1.0)], None, (0, 1, 0), 0.6),
        ([torch.full((4,), 40.0), torch.full((4,), 0.1)], 1.0, (0, 1, 0), 0.6),
        ([torch.ones(3), torch.tensor([1.0, float("nan")])], None, (0, 0, 1), 0.0),
    ],
)
def test_health_of_faulty_gradients(
    gradients: list[torch.Tensor], clip_norm: float | None, counts: tuple[int, ...], health: float
) -> None:
    result = backlight.collect(net(*gradients), clip_norm=clip_norm).result()
    assert (result.vanishing, result.exploding, result.non_finite) == counts
    assert result.health == pytest.approx(health)
    assert [values.nan for values in result.values] == [int(g.isnan().sum()) for g in gradients]


@pytest.mark.parametrize(
    ("norms", "limits", "marks"),
    [
        ([1.1e-7, 0.9e-7, 1e-6], {}, (1, 0)),
        ([1e-7, 1e-6], {"vanishing": 1e-5}, (2, 0)),
        ([99.0, 101.0, 50.0], {}, (0, 1)),
        ([99.0, 101.0, 50.0], {"exploding": 60}, (0, 2)),
        ([1e-8, 1.0, 1.0], {"vanishing": 0.0}, (1, 0)),
        ([1e-8, 1.0, 1.0], {"vanishing": 0.0, "relative_vanishing": 1e-9}, (0, 0)),
        ([1e-3, 1e-3, 11.0], {}, (0, 1)),
        ([1e-3, 1e-3, 11.0], {"relative_exploding": 1e5}, (0, 0)),
        ([0.0, 1.0], {"vanishing": 0.0}, (1, 0)),
    ],
)
def test_limits_are_of_each_parameter(
    norms: list[float], limits: dict[str, float], marks: tuple[int, int]
) -> None:
    # One value each: the rms is the norm. The relative limit needs an rms below 1e-8 as well.
    thresholds = {"vanishing_rms": 1e-7}
    parameters = net(*(torch.tensor([norm]) for norm in norms))
    result = backlight.collect(parameters, **limits, thresholds=thresholds).result()
    assert isinstance(result, backlight.Collected)
    assert (result.vanishing, result.exploding) == marks
    group = backlight.collect_groups({"all": parameters}, **limits, thresholds=thresholds).result()
    assert (group.vanishing, group.exploding) == marks
    assert isinstance(group.groups["all"], backlight.GroupValues)


def test_docstring_gives_the_defaults() -> None:
    limits = CollectLimits()
    assert (limits.vanishing, limits.exploding) == (1e-7, 100.0)
    assert (limits.relative_vanishing, limits.relative_exploding) == (1e-4, 1e4)
    for function in (backlight.collect, backlight.collect_groups):
        parameters = inspect.signature(function).parameters
        assert {name: parameters[name].default for name in vars(limits)} == vars(limits)
    text = backlight.collect.__doc__ or ""
    assert "1e-7 and 100 by default" in text
    assert "1e-4 and 1e4 by default" in text


def test_collection_in_compiled_code_warns_of_nothing() -> None:
    torch._dynamo.reset()
    parameters = net(torch.ones(3), torch.ones(2))

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        backlight.collect(parameters)
        return x + 1

    assert step(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_result_is_computed_once() -> None:
    pending = backlight.collect(net(torch.ones(2)))
    assert pending.result() is pending.result()
    assert pending.ready()


def test_duplicate_tensor_counts_once() -> None:
    (parameter,) = net(torch.full((4,), 2.0))
    assert backlight.collect([parameter, parameter]).result().total_norm == 4.0


def test_groups_and_ratios() -> None:
    model = nn.ModuleDict({"host": nn.Linear(2, 2, bias=False), "graft": nn.Linear(8, 8, bias=False)})
    model["host"].weight.grad = torch.full((2, 2), 0.5)
    model["graft"].weight.grad = torch.full((8, 8), 2.0)
    by_pattern = backlight.collect_groups({"host": "host.*", "graft": "graft"}, model=model).result()
    by_module = backlight.collect_groups({"host": model["host"], "graft": model["graft"]}).result()
    for result in (by_pattern, by_module):
        assert result.ratios["graft", "host"] == 4.0  # no epsilon; tensors may differ in size
        assert result.ratios["host", "graft"] == 0.25
        assert result.groups["graft"].norm == pytest.approx(16.0)
    # A group result can be compared with groups of another call.
    assert by_pattern.groups["graft"].ratio(by_module.groups["graft"]) == 1.0


def test_unmeasured_group_has_no_ratio() -> None:
    one, other = net(torch.ones(3), None)
    result = backlight.collect_groups({"a": [one], "b": [other]}).result()
    assert math.isnan(result.ratios["a", "b"])
    assert not result.groups["b"].measured


@pytest.mark.slow
def test_invalid_input_is_rejected() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2)})
    with pytest.raises(
        ValueError, match=r"pattern 'encodr\.\*' matches none of 2 parameters; did you mean 'encoder'"
    ):
        backlight.collect_groups({"host": "encodr.*"}, model=model)
    with pytest.raises(ValueError, match="the group 'host' is empty; expected at least one parameter"):
        backlight.collect_groups({"host": []})
    with pytest.raises(ValueError, match="give model= for it"):
        backlight.collect_groups({"host": "encoder.*"})
    with pytest.raises(TypeError, match="item 0 is int, expected a tensor"):
        backlight.collect([3])
    with pytest.raises(ValueError, match="vanishing_rmss"):
        backlight.collect([], thresholds={"vanishing_rmss": 1.0})
    with pytest.raises(ValueError, match=r"exploding=-1 is out of range; expected 0 or more"):
        backlight.collect([], exploding=-1)
    with pytest.raises(ValueError, match=r"relative_vanishing=nan is out of range"):
        backlight.collect_groups({}, relative_vanishing=math.nan)
