"""The compiled pass equals the eager kernels, is built apart from training, or reports why it is unused."""

import math
import os
import shutil
import sys
import textwrap
import time

import numpy as np
import pytest
import torch

from backlight.measure.stats import statistics as module
from backlight.measure.stats.compiled_rows import COMPILE_S, PARALLEL_SCALARS, ROW, CompiledRows, is_plain
from backlight.measure.stats.statistics import statistics, why_not_compiled
from processes import run_captured

NAN, INF = math.nan, math.inf
SIZES = (1, 7, 511, 512, 513, ROW - 1, ROW, ROW + 1, 2**18 + 5)

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"
)


@pytest.fixture
def rows(monkeypatch):
    """Replace the compiled pass of the process by one that is not requested yet."""
    fresh = CompiledRows()
    monkeypatch.setattr(module, "COMPILED_ROWS", fresh)
    return fresh


def test_scalars_of_a_plain_tensor_alone_are_read_by_address():
    values = torch.randn(4, 6)
    assert is_plain(values)
    assert is_plain(values[1:])
    for other in (values.t(), values[:, ::2], torch._neg_view(values), torch.nn.Parameter(values)):
        assert not is_plain(other)


def with_values(*values, size=2**17 + 3):
    tensor = torch.randn(size)
    tensor[:: size // len(values)][: len(values)] = torch.tensor(values)
    return tensor


def matrix(dtype):
    """Return tensors of every layout and special value, and some of every length around a row."""
    large = 2**17 + 3
    tensors = [
        torch.randn(400, 500),
        torch.randn(400, 500).t(),
        torch.randn(20, 30, 40, 10).contiguous(memory_format=torch.channels_last),
        torch.randn(800, 500)[:, ::2],
        torch.randn(large, 1).expand(large, 3),
        torch.randn(large + 9)[7:],
        torch.randn(2 * large)[::2],
        torch._neg_view(torch.randn(large)),
        torch.randn(large + 13, requires_grad=True),
        torch.zeros(large),
        -torch.zeros(large),
        with_values(NAN, 1.0, 0.0),
        with_values(INF, -INF, 3.0),
        with_values(-INF, 0.0),
        with_values(NAN, INF, size=2**17),
        torch.full((large,), 1e20),
        torch.full((large,), 1e-30),
        torch.full((large,), 1e-44),
        with_values(3e38, -3e38, 1e-45, 0.0, -0.0),
        with_values(6e-8, -6e-8, 6e-5, 65504.0, -6.1e-5),
        torch.empty(0),
        torch.tensor(2.0),
        *(torch.randn(size) for size in SIZES),
    ]
    return [tensor.to(dtype) for tensor in tensors]


def assert_same(one, other):
    (floats, integers), (plain, counts) = one.arrays(), other.arrays()
    np.testing.assert_array_equal(integers, counts)
    np.testing.assert_array_equal(floats[:, 1], plain[:, 1])
    np.testing.assert_allclose(floats[:, 0], plain[:, 0], rtol=1e-13)
    size = np.maximum(integers[:, 1], 1)
    slack = 1e-13 * np.where(np.isfinite(floats[:, 0]), np.sqrt(size) * floats[:, 0], 0)
    finite = np.isfinite(floats[:, 2])
    np.testing.assert_array_equal(floats[~finite, 2], plain[~finite, 2])
    assert (np.abs(floats[finite, 2] - plain[finite, 2]) <= slack[finite]).all()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tiers_agree(dtype, check):
    tensors = matrix(dtype)
    flat = torch.randn(2**18).to(dtype)
    tensors += [flat[1:-1], flat[7:1008], flat[8:9]]
    state = torch.get_rng_state()
    found = statistics(tensors, tier="compiled")
    assert why_not_compiled() == ""
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(found, statistics(tensors, tier="eager"))
    check(found, tensors)


@pytest.mark.slow
@needs_compiler
def test_subnormal_halves_count_where_the_thread_flushes_them(check):
    tensors = [with_values(6e-8, -6e-8, 6.1e-5, 0.0).half()]
    torch.set_flush_denormal(True)
    try:
        found = statistics(tensors, tier="compiled")
        found.arrays()
    finally:
        torch.set_flush_denormal(False)
    check(found, tensors)


@pytest.mark.slow
@needs_compiler
def test_counts_are_exact_and_independent_of_threads(monkeypatch):
    ones = torch.ones(2**24 + 5)
    ones[7] = 0
    assert ones.numel() > PARALLEL_SCALARS
    values = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        floats, integers = statistics([ones], tier="compiled").arrays()
        assert integers[0].tolist() == [1, 2**24 + 5, 1, 0, 0]
        assert floats[0].tolist() == [2.0**12 * math.sqrt(1 + 2**-22), 1.0, 2**24 + 4]
        random = torch.randn(2**23, generator=torch.Generator().manual_seed(0))
        values.append(statistics([random], tier="compiled").arrays()[0])
    np.testing.assert_array_equal(*values)


@pytest.mark.slow
@needs_compiler
def test_operations_that_are_intercepted_are_measured_eagerly(check):
    tensors = [torch.randn(2**17), torch.randn(5)]
    for mode in (torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode:
            check(statistics(tensors, tier="compiled"), tensors)
    with torch.inference_mode():
        inference = torch.randn(2**17)
    check(statistics([inference], tier="compiled"), [inference])


def test_rare_types_are_eager_in_any_tier(rows, check):
    tensors = [torch.randn(2**17, dtype=dtype) for dtype in (torch.float64, torch.complex64)]
    check(statistics(tensors, tier="compiled"), tensors)
    assert rows._thread is None


def test_missing_compiler_is_not_tried_again(rows, monkeypatch, check):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    tensors = [torch.randn(2**17), torch.randn(9)]
    for _ in range(3):
        check(statistics(tensors, tier="compiled"), tensors)
    assert why_not_compiled() == (
        "CompileError: no C compiler; expected cc, gcc or clang in PATH, or its name in CC"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "reason"),
    {
        "echo no space left; exit 3": "sh failed: no space left",
        "touch $LIBRARY": "failed: Traceback",  # what comes out cannot be loaded
    }.items(),
)
def test_failing_compiler_is_reported(rows, monkeypatch, check, compiler, reason):
    monkeypatch.setenv("CC", f"sh -c 'for LIBRARY; do :; done; {compiler}' sh")
    tensors = [torch.randn(2**17), torch.randn(9)]
    check(statistics(tensors, tier="compiled"), tensors)
    assert reason in why_not_compiled()


@pytest.mark.slow
def test_failure_of_the_compiled_pass_loses_no_tensor(rows, monkeypatch, check):
    monkeypatch.setattr(CompiledRows, "is_ready", lambda self: True)
    tensors = [torch.randn(2**17), torch.randn(2**18), torch.randn(3)]
    check(statistics(tensors), tensors)
    assert why_not_compiled().startswith("TypeError")


def test_it_is_requested_once_eager_time_reaches_its_cost(rows, monkeypatch):
    requests = []
    monkeypatch.setattr(CompiledRows, "request", lambda self: requests.append(self._spent))
    statistics([torch.randn(200_000)])
    assert 0 < rows._spent < COMPILE_S
    spent = rows._spent
    statistics([torch.randn(200_000, dtype=torch.float64)])
    statistics([torch.randn(200_000)], tier="eager")
    assert rows._spent == spent  # what would not be compiled saves nothing
    assert requests == []
    rows.spend(COMPILE_S)
    assert len(requests) == 1


@pytest.mark.slow
@needs_compiler
def test_eager_kernels_serve_while_it_compiles(rows, monkeypatch, tmp_path, check):
    """The compiler waits for the test; the training thread waits for nothing, and switches afterwards."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("CC", f"sh -c 'while [ ! -e {gate} ]; do sleep 0.01; done; cc \"$@\"' sh")
    tensors = [torch.randn(2**17), torch.randn(9)]
    rows.spend(COMPILE_S)
    eager = statistics(tensors)
    check(eager, tensors)
    assert rows._function is None
    assert rows._thread.daemon
    gate.touch()
    rows.wait()
    assert why_not_compiled() == ""
    spent = rows._spent
    compiled = statistics(tensors)
    assert rows._spent == spent
    assert_same(compiled, eager)


def test_nothing_is_measured_inside_compiled_function(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    floats, integers = statistics([torch.ones(3)]).arrays()
    assert not integers.any()
    assert not floats.any()


COMPILING = """
        os.environ["CC"] = "sh -c 'exec sleep 60' sh"
        COMPILED_ROWS.request()
        while not COMPILED_ROWS._compiler:
            time.sleep(0.01)
        """

SCRIPTS = {
    "nothing of torch's compiler is used": """
        COMPILED_ROWS.wait()
        statistics([torch.randn(140_000)], tier="compiled").arrays()
        assert why_not_compiled() == ""
        assert "torch._dynamo" not in sys.modules
        """,
    "counters and settings of torch's compiler are unchanged": """
        import copy
        import torch._dynamo
        torch._dynamo.config.error_on_recompile = True
        double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
        x = torch.ones(140_000)
        double(x)
        before = copy.deepcopy(dict(torch._dynamo.utils.counters)), torch._dynamo.config.shallow_copy_dict()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            statistics([x.to(dtype), torch.ones(190_000, dtype=dtype)], tier="compiled").arrays()
        assert why_not_compiled() == ""
        after = dict(torch._dynamo.utils.counters), torch._dynamo.config.shallow_copy_dict()
        assert before == after
        assert torch.equal(double(x), x * 2)
        """,
    "a script that waits for its children finds none": COMPILING
    + """
        try:
            os.wait()
        except ChildProcessError:
            pass
        else:
            raise AssertionError
        """,
    "the process ends while it compiles": COMPILING
    + """
        print(COMPILED_ROWS._compiler)
        """,
    "a fork while it compiles": COMPILING
    + """
        child = os.fork()
        x = [torch.randn(140_000)]
        if not child:
            COMPILED_ROWS.spend(1e9)
            assert statistics(x, tier="compiled").arrays()[0].all()
            assert why_not_compiled() == "not compiled in a forked process"
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.kill(COMPILED_ROWS._compiler, 0)  # the child has not ended it
        assert why_not_compiled() == ""
        """,
    "a fork afterwards": """
        COMPILED_ROWS.wait()
        x = [torch.randn(140_000)]
        child = os.fork()
        found = statistics(x, tier="compiled").arrays()[0]
        assert why_not_compiled() == ""
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("case", SCRIPTS)
def test_in_its_own_process(case, tmp_path):
    script = (
        "import os, sys, time, torch\n"
        "from backlight.measure.stats.compiled_rows import COMPILED_ROWS\n"
        "from backlight.measure.stats.statistics import *\n"
    ) + textwrap.dedent(SCRIPTS[case])
    ended = run_captured(
        [sys.executable, "-c", script], timeout=250, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert ended.returncode == 0, ended.stderr
    assert list(tmp_path.glob("backlight-*")) == []
    if case == "the process ends while it compiles":  # and its compiler with it
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and os.path.exists(f"/proc/{int(ended.stdout)}"):  # noqa: PTH110
            time.sleep(0.05)
        assert time.monotonic() < deadline


def test_background_tier_compiles_at_once_and_changes_over_within_a_pass(rows, monkeypatch):
    monkeypatch.setattr(rows, "request", lambda: requested.append(True))
    requested = []
    tensors = [torch.randn(300), torch.randn(2**18), torch.randn(7).bfloat16()]
    statistics(tensors[:1], tier="background")
    statistics(tensors, tier="auto")
    assert requested == []
    monkeypatch.setattr(module, "_PART", 2**17)
    parts = []
    monkeypatch.setattr(rows, "is_ready", lambda: len(parts) > 1 or bool(parts.append(1)))
    measured = []
    monkeypatch.setattr(rows, "measure", lambda values: measured.append(len(values)) or by_hand(values))
    two = [torch.randn(2**17), torch.randn(2**17 + 1)]
    found = statistics(two, tier="background")
    assert requested == [True]
    assert measured == [1]  # the second one, after an eager first
    assert_same(found, statistics(two, tier="eager"))


def by_hand(values):
    wide = [value.double() for value in values]
    numbers = [[v.norm(), v.abs().max(), v.sum(), (v != 0).sum()] for v in wide]
    return torch.tensor(numbers, dtype=torch.float64), [1] * len(values)
