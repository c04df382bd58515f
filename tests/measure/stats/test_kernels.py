"""Joined norms; the compiled tier equals the eager tier, or reports why it is unused."""

import math
import os
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from backlight.measure.stats import kernels as kernels_module
from backlight.measure.stats import statistics as module
from backlight.measure.stats.kernels import (
    COMPILE_WITH_IMPORT_S,
    CompileTrigger,
    Kernel,
    Kernels,
    max_by,
    root_sum_squares,
    root_sum_squares_by,
)
from backlight.measure.stats.packed_matrices import SMALL
from backlight.measure.stats.statistics import statistics, why_not_compiled

LARGE = SMALL + 3
NAN, INF = math.nan, math.inf

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))),
    reason="torch.compile on the CPU needs a C++ compiler",
)


@pytest.fixture
def kernels(monkeypatch):
    """Replace the kernels by ones without compiled code."""
    fresh = Kernels()
    for owner in (module, kernels_module):
        monkeypatch.setattr(owner, "KERNELS", fresh)
    return fresh


@pytest.fixture
def trigger(monkeypatch):
    fresh = CompileTrigger()
    monkeypatch.setattr(module, "COMPILE_TRIGGER", fresh)
    return fresh


def with_values(*values, size=LARGE):
    tensor = torch.randn(size)
    tensor[:: size // len(values)][: len(values)] = torch.tensor(values)
    return tensor


def matrix(dtype):
    """Return large tensors of every layout and special value, and small ones."""
    tensors = [
        torch.randn(400, 500),
        torch.randn(400, 500).t(),
        torch.randn(20, 30, 40, 10).contiguous(memory_format=torch.channels_last),
        torch.randn(800, 500)[:, ::2],
        torch.randn(LARGE, 1).expand(LARGE, 3),
        torch.randn(LARGE + 9)[7:],
        torch.randn(2 * LARGE)[::2],
        torch._neg_view(torch.randn(LARGE)),
        torch.randn(LARGE + 13, requires_grad=True),
        torch.zeros(LARGE),
        -torch.zeros(LARGE),
        with_values(NAN, 1.0, 0.0),
        with_values(INF, -INF, 3.0),
        with_values(-INF, 0.0),
        with_values(NAN, INF, size=2**17),
        torch.full((LARGE,), 1e20),
        torch.full((LARGE,), 1e-30),
        torch.full((LARGE,), 1e-44),
        with_values(3e38, -3e38, 1e-45, 0.0, -0.0),
        torch.randn(7),
        torch.empty(0),
        torch.tensor(2.0),
    ]
    assert [tensor.requires_grad for tensor in tensors].count(True) == 1
    return [tensor.to(dtype) for tensor in tensors]


def assert_same(one, other):
    np.testing.assert_array_equal(one.arrays()[1], other.arrays()[1])
    np.testing.assert_array_equal(one.arrays()[0][:, 1], other.arrays()[0][:, 1])
    np.testing.assert_allclose(one.arrays()[0][:, 0], other.arrays()[0][:, 0], rtol=1e-13)
    size = np.maximum(one.arrays()[1][:, 1], 1)
    slack = 1e-13 * np.where(np.isfinite(one.arrays()[0][:, 0]), np.sqrt(size) * one.arrays()[0][:, 0], 0)
    same = one.arrays()[0][:, 2], other.arrays()[0][:, 2]
    finite = np.isfinite(same[0])
    np.testing.assert_array_equal(same[0][~finite], same[1][~finite])
    assert (np.abs(same[0][finite] - same[1][finite]) <= slack[finite]).all()


@needs_compiler
def test_tiers_agree_and_nothing_is_compiled_twice(kernels, check):
    import torch._dynamo

    torch._dynamo.utils.counters.clear()
    tensors = matrix(torch.float32)
    state = torch.get_rng_state()
    found = statistics(tensors, tier="compiled")
    assert why_not_compiled() == ""
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert_same(found, statistics(tensors, tier="eager"))
    check(found, tensors)

    counters = torch._dynamo.utils.counters["stats"]
    assert counters["unique_graphs"] == 1
    for size in (2**17, 2**17 + 1, 2**18, 323_456):
        tensor = torch.randn(size)
        check(statistics([tensor], tier="compiled", scale=1.0), [tensor])
    ones = torch.ones(2**24 + 5)
    ones[7] = 0
    floats, integers = statistics([ones], tier="compiled").arrays()
    assert integers[0].tolist() == [1, 2**24 + 5, 1, 0, 0]
    assert floats[0].tolist() == [2.0**12 * math.sqrt(1 + 2**-22), 1.0, 2**24 + 4]
    with torch.inference_mode():
        check(statistics(tensors[:2], tier="compiled"), tensors[:2])
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        check(statistics(tensors[:2], tier="compiled"), tensors[:2])
    assert why_not_compiled() == ""
    with torch.no_grad():
        check(statistics(tensors[:2], tier="compiled"), tensors[:2])
    with torch.inference_mode():
        inference = torch.randn(LARGE)
    check(statistics([inference], tier="compiled"), [inference])
    many = torch.ones(2 * 2**24 + 10).view(2, -1)  # more in a row than a float32 can count
    many[1, 7] = 0
    kernel = kernels.get(many.device, many.dtype)
    with torch.no_grad():
        assert kernel.run(many)[3].tolist() == [2**24 + 5, 2**24 + 4]
    assert why_not_compiled() == ""
    assert counters["unique_graphs"] == 1


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tiers_agree_on_small_types(dtype, check):
    tensors = matrix(dtype)
    flat = torch.randn(5 * LARGE).to(dtype)
    tensors += [flat[1:-1], flat[7 : LARGE + 8], flat[8 : LARGE + 9], flat[LARGE : 3 * LARGE]]
    found = statistics(tensors, tier="compiled")
    assert why_not_compiled() == ""
    assert_same(found, statistics(tensors, tier="eager"))
    check(found, tensors)


def test_rare_types_are_eager_in_any_tier(kernels, check):
    tensors = [torch.randn(LARGE, dtype=dtype) for dtype in (torch.float64, torch.complex64)]
    check(statistics(tensors, tier="compiled"), tensors)
    assert kernels.reason == ""
    assert kernels._kernels == {}


def test_failed_compiler_is_not_tried_again(kernels, monkeypatch, check):
    compiled_types = []

    def compile_(self, device, dtype, rows):
        compiled_types.append(dtype)
        raise RuntimeError("no compiler\n\n  here\nand a long story")

    monkeypatch.setattr(Kernels, "_compile", compile_)
    tensors = [torch.randn(LARGE), torch.randn(9)]
    for _ in range(3):
        check(statistics(tensors, tier="compiled"), tensors)
    assert compiled_types == [torch.float32]
    assert why_not_compiled() == "RuntimeError: no compiler here"


def test_late_kernel_failure_loses_no_tensor(kernels, monkeypatch, check):
    def kernel(x_RW):
        if x_RW.numel() > LARGE:
            raise RuntimeError("broken")
        return torch.zeros(4, len(x_RW), dtype=torch.float64)

    monkeypatch.setattr(Kernels, "_compile", lambda self, device, dtype, rows: Kernel(kernel, rows))
    tensors = [torch.randn(LARGE), torch.randn(2 * LARGE), torch.randn(3)]
    check(statistics(tensors, tier="compiled"), tensors)
    assert why_not_compiled() == "RuntimeError: broken"


def test_number_of_compilations_is_limited(kernels, monkeypatch, check):
    made = []

    def compile_(self, device, dtype, rows):
        made.append(torch.get_default_dtype())
        return Kernel(len, rows)

    monkeypatch.setattr(Kernels, "_compile", compile_)
    threads = iter(range(1, 100))
    monkeypatch.setattr(torch, "get_num_threads", lambda: next(threads))
    device = torch.device("cpu")
    found = [kernels.get(device, torch.float32) for _ in range(20)]
    assert len(made) == 8
    assert found[8:] == [None] * 12
    assert kernels.reason == ""


def test_auto_tier_compiles_once_eager_cost_reaches_compile_cost(kernels, trigger, monkeypatch):
    compiled_types = []
    monkeypatch.setattr(
        Kernels, "_compile", lambda self, device, dtype, rows: compiled_types.append(dtype) or 1 / 0
    )
    monkeypatch.delitem(sys.modules, "torch._inductor.compile_fx", raising=False)
    large = [torch.randn(200_000)]
    statistics(large)
    assert not trigger.is_due()
    assert 0 < trigger._spent < 1
    spent = trigger._spent
    statistics([torch.randn(9)] * 50)
    assert trigger._spent == spent  # small tensors use no kernel
    trigger.spend(COMPILE_WITH_IMPORT_S)
    assert trigger.is_due()
    statistics(large, tier="eager")
    assert compiled_types == []
    statistics(large)
    assert compiled_types == [torch.float32]
    assert why_not_compiled() == "ZeroDivisionError: division by zero"


def test_nothing_is_measured_inside_compiled_function(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    floats, integers = statistics([torch.ones(3)]).arrays()
    assert not integers.any()
    assert not floats.any()


SCRIPTS = {
    "recompiling is an error": """
        torch._dynamo.config.error_on_recompile = True
        x = [torch.randn(n) for n in (140_000, 150_000, 262_144)]
        a = statistics(x, tier="compiled").arrays()
        assert why_not_compiled() == ""
        torch.use_deterministic_algorithms(True)
        b = statistics(x, tier="compiled").arrays()
        y = [p.bfloat16() for p in x]
        statistics(y, tier="compiled").arrays()
        assert why_not_compiled() == ""
        assert abs(a[0] - b[0]).max() < 1e-9
        """,
    **{
        f"compiling is disabled by {off}": f"""
        import torch._dynamo
        {off}
        x = torch.randn(140_000)
        values, counts = statistics([x], tier="compiled").arrays()
        assert why_not_compiled().startswith("NotCompiledError"), why_not_compiled()
        assert abs(values[0, 0] - float(x.double().norm())) < 1e-9
        """
        for off in ("torch.compiler.set_stance('force_eager')", "torch._dynamo.config.disable = True")
    },
    "compiled functions of the user are unchanged": """
        import torch._dynamo
        torch._dynamo.config.recompile_limit = 2
        torch._dynamo.config.error_on_recompile = True
        calls = []

        def backend(graph, inputs):
            calls.append(graph)
            return graph.forward

        double = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
        x = torch.ones(140_000)
        double(x)
        config = torch._dynamo.config
        before = config.recompile_limit, config.error_on_recompile
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            statistics([x.to(dtype), torch.ones(190_000, dtype=dtype)], tier="compiled").arrays()
        assert why_not_compiled() == ""
        assert before == (config.recompile_limit, config.error_on_recompile)
        assert torch.equal(double(x), x * 2)
        assert len(calls) == 1
        """,
    "compiling starts no process": """
        import os, sys
        statistics([torch.randn(140_000)], tier="compiled").arrays()
        assert why_not_compiled() == ""
        assert open(f"/proc/self/task/{os.getpid()}/children").read().split() == []
        """,
    "large tensors use several threads": """
        from backlight.measure.stats.kernels import KERNELS, PARALLEL_SCALARS
        torch.set_num_threads(2)
        x = [torch.randn(PARALLEL_SCALARS + 5), torch.randn(200_000)]
        found, plain = (statistics(x, tier=tier).arrays() for tier in ("compiled", "eager"))
        assert why_not_compiled() == ""
        assert sorted(key[2] for key in KERNELS._kernels) == [4, 16]
        assert (found[1] == plain[1]).all()
        assert abs(found[0] - plain[0]).max() < 1e-8
        """,
}


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("case", SCRIPTS)
def test_compiled_tier_in_its_own_process(case):
    script = "import torch\nfrom backlight.measure.stats.statistics import *\n" + textwrap.dedent(
        SCRIPTS[case]
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=False
    )
    assert ended.returncode == 0, ended.stderr
    if case == "compiling starts no process":
        assert ended.stderr == ""


def test_root_sum_squares_along_axis():
    values = np.array([[3.0, 4.0], [5.0, 12.0]])
    assert root_sum_squares(values) == pytest.approx(math.sqrt(194))
    assert root_sum_squares(values, axis=1).tolist() == [5.0, 13.0]
    assert root_sum_squares(values, axis=0).tolist() == pytest.approx([math.sqrt(34), math.sqrt(160)])


@pytest.mark.parametrize("unit", [1e300, 1e-300, 5e-324, 1.0])
def test_root_sum_squares_at_any_magnitude(unit):
    assert float(root_sum_squares([3 * unit, 4 * unit])) == pytest.approx(5 * unit, rel=1e-15)


def test_roots_of_nothing_and_of_non_finite_values():
    assert root_sum_squares([]) == 0.0
    assert root_sum_squares(np.empty((0, 3)), axis=0).tolist() == [0.0, 0.0, 0.0]
    assert math.isnan(root_sum_squares([1.0, math.nan, math.inf]))
    assert root_sum_squares([1.0, -math.inf]) == math.inf


def test_root_sum_squares_by_owner():
    owner = np.array([2, 0, 2, 0, 3, 3])
    values = np.array([3e200, 3e-200, 4e200, 4e-200, math.nan, 1.0])
    result = root_sum_squares_by(owner, values, 5)
    np.testing.assert_allclose(result, [5e-200, 0.0, 5e200, math.nan, 0.0], rtol=1e-15)
    np.testing.assert_array_equal(max_by(owner, values, 5), [4e-200, 0.0, 4e200, math.nan, 0.0])
