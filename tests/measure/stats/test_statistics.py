"""Every dtype, layout and special value against a reference without torch."""

import math

import numpy as np
import pytest
import torch

from backlight.measure.stats.kernels import SCRATCH
from backlight.measure.stats.statistics import statistics
from backlight.series import GRADIENT

REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*REAL, *COMPLEX)
NAN, INF = math.nan, math.inf


def made(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    base = torch.complex128 if dtype.is_complex else torch.float64
    values = torch.randn(shape, dtype=base)
    values.view(-1)[::7] = 0
    return values.to(dtype)


LAYOUTS = {
    "contiguous": lambda d: made(d, 6, 50),
    "empty": lambda d: made(d, 0),
    "empty matrix": lambda d: made(d, 3, 0, 2),
    "scalar": lambda d: made(d, 3)[1],
    "transposed": lambda d: made(d, 40, 30).t(),
    "permuted": lambda d: made(d, 4, 5, 6, 1).permute(2, 0, 3, 1),
    "channels last": lambda d: made(d, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "strided": lambda d: made(d, 20, 30)[::3, 1::2],
    "offset": lambda d: made(d, 100)[37:],
    "expanded": lambda d: made(d, 1, 7, 1).expand(5, 7, 11),
    "expanded and transposed": lambda d: made(d, 7, 1, 3).expand(7, 9, 3).transpose(0, 2),
    "overlapping": lambda d: made(d, 30).as_strided((10, 5), (2, 1)),
    "large": lambda d: made(d, 140, 1001),
    "large, strided": lambda d: made(d, 280, 1001)[:, ::2],
    "large, in three dimensions": lambda d: made(d, 3, 200, 300)[:, 1:, 1:],
    "needs a gradient": lambda d: made(d, 5, 5).requires_grad_(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtypes_and_layouts(dtype, layout, check):
    tensor = LAYOUTS[layout](dtype)
    check(statistics([tensor], tier="eager"), [tensor])


@pytest.mark.slow
@pytest.mark.usefixtures("as_device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accelerator_path_equals_oracle(dtype, check):
    tensors = [make(dtype) for make in LAYOUTS.values()]
    check(statistics(tensors, tier="eager"), tensors)


SPECIALS = {
    "nan": [1.0, NAN, 0.0],
    "inf": [1.0, INF, 2.0],
    "minus inf": [-INF, 1.0],
    "both infinities": [INF, -INF, 3.0],
    "nan next to inf": [NAN, INF, -INF],
    "only nan": [NAN],
    "zeros": [0.0, -0.0, 0.0],
    "negative largest": [1.0, -7.0, 3.0],
}


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("special", SPECIALS)
def test_special_values(special, dtype, path, check, request):
    if path == "device":
        request.getfixturevalue("as_device")
    small = torch.tensor(SPECIALS[special], dtype=torch.float64).to(dtype)
    large = torch.ones(200_003, dtype=torch.float64).to(dtype)
    large[[5, 150_000, 200_002][: len(small)]] = small
    tensors = [torch.ones(3).to(dtype), small, large, torch.ones(5).to(dtype)]
    check(statistics(tensors, tier="eager"), tensors)


def test_complex_parts_that_are_not_finite(check):
    values = [complex(1, NAN), complex(INF, 1), complex(NAN, INF), complex(0, -0.0), complex(0, 2)]
    for dtype in COMPLEX:
        tensors = [torch.tensor([v], dtype=dtype) for v in values] + [torch.tensor(values, dtype=dtype)]
        check(statistics(tensors), tensors)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        *((value, torch.float32) for value in (1e20, 3e38, 1e-30, 1e-45)),
        *((value, torch.bfloat16) for value in (3e38, 1e-40)),
        *((value, torch.float16) for value in (6e4, 6e-8)),
        *((value, torch.float64) for value in (1e200, 1e302, 1e-200, 5e-324)),
        *((value, torch.complex64) for value in (2e38, 1e-45)),
        *((value, torch.complex128) for value in (1e200, 1e-320)),
    ],
)
@pytest.mark.parametrize("size", [3, 100_000])
def test_values_whose_squares_overflow_type(value, dtype, size, check):
    tensor = torch.full((size,), value, dtype=dtype)
    tensor[1] = 0
    tensor[2] = -tensor[0]
    norm = statistics([tensor]).arrays()[0][0, 0]
    assert math.isfinite(norm)
    assert norm > 0
    check(statistics([tensor]), [tensor])


def test_magnitudes_far_apart_in_one_tensor(check):
    tensors = [
        torch.tensor([1e20, 1e-30, -1e20, 1.0]),
        torch.tensor([1e300, 1e-300, 1.0], dtype=torch.float64),
        torch.cat((torch.full((300_000,), 1e-200, dtype=torch.float64), torch.ones(1, dtype=torch.float64))),
    ]
    check(statistics(tensors), tensors)


def test_sum_that_fp32_cannot_hold():
    tensor = torch.cat((torch.full((2**15,), 1e8), torch.tensor([1.0]), torch.full((2**15,), -1e8)))
    assert statistics([tensor]).arrays()[0][0, 2] == 1.0


def sparse_cases() -> dict[str, torch.Tensor]:
    indices = torch.tensor([[0, 2, 2, 4], [1, 3, 3, 0]])
    duplicates = torch.sparse_coo_tensor(
        indices, [1.0, 2.0, -5.0, 0.0], (5, 6), check_invariants=True, dtype=torch.float32
    )
    vanishing = torch.sparse_coo_tensor([[1, 1]], [2.0, -2.0], (4,), check_invariants=True)
    hybrid = torch.sparse_coo_tensor([[0, 3, 0]], torch.randn(3, 8), (9, 8), check_invariants=True)
    positions, integers = torch.randint(0, 50, (2, 3000)), torch.randint(-9, 9, (3000,)).float()
    many = torch.sparse_coo_tensor(positions, integers, (50, 50), check_invariants=True)
    empty = torch.sparse_coo_tensor(torch.empty(2, 0), torch.empty(0), (3, 4), check_invariants=True)
    bad = torch.sparse_coo_tensor([[1, 1, 2]], [INF, -INF, 1.0], (4,), check_invariants=True)
    return {
        "duplicates": duplicates,
        "coalesced": duplicates.coalesce(),
        "duplicates that vanish": vanishing,
        "hybrid": hybrid,
        "many": many,
        "empty": empty,
        "not finite": bad,
        "double": many.double(),
        "complex": (many * (1 + 2j)).to(torch.complex64),
    }


@pytest.mark.parametrize("case", sparse_cases())
def test_sparse_tensors(case, check):
    tensor = sparse_cases()[case]
    check(statistics([tensor, torch.ones(2)]), [tensor, torch.ones(2)])


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_compressed_sparse(layout, check):
    dense = torch.randn(6, 8) * (torch.rand(6, 8) > 0.6)
    block = ((2, 4),) if layout in {"bsr", "bsc"} else ()
    tensor = getattr(dense, f"to_sparse_{layout}")(*block)
    check(statistics([tensor]), [tensor])


@pytest.mark.slow
def test_conjugated_and_negated_views(check):
    z = torch.randn(40, 30, dtype=torch.complex64)
    large = torch.randn(300, 700, dtype=torch.complex64).conj()
    tensors = [z.conj(), z.conj().t(), z.conj().imag, z.conj().imag[:, ::2], z.real, z[:, ::2].conj(), large]
    assert tensors[2].is_neg()
    check(statistics(tensors), tensors)


def test_nothing_to_measure():
    floats, integers = statistics([]).arrays()
    assert floats.shape == (0, len(GRADIENT.floats))
    assert integers.shape == (0, len(GRADIENT.integers))
    floats, integers = statistics([None, torch.ones(2, device="meta"), torch.empty(0)]).arrays()
    assert integers.tolist() == [[0] * 5, [0] * 5, [1, 0, 0, 0, 0]]
    assert not floats.any()


def test_integers_are_refused():
    with pytest.raises(
        TypeError, match=r"floating-point and complex tensors, got torch.int64 of shape \(3,\)"
    ):
        statistics([torch.arange(3)])


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize(
    "scale", [2.0**16, torch.tensor(2.0**16), torch.tensor([3.0])], ids=["float", "0-d", "1-d"]
)
def test_values_are_divided_by_scale(scale, path, request):
    if path == "device":
        request.getfixturevalue("as_device")
    tensor = torch.randn(1000)
    plain = statistics([tensor, None]).arrays()
    scaled = statistics([tensor, None], scale=scale).arrays()
    np.testing.assert_allclose(scaled[0], plain[0] / float(scale), rtol=1e-15)
    assert (scaled[1] == plain[1]).all()


def test_scale_is_read_at_call():
    scale = torch.tensor(4.0)
    pending = statistics([torch.ones(4)], scale=scale)
    scale.mul_(2)
    assert pending.arrays()[0][0].tolist() == [0.5, 0.25, 1.0]


def test_values_are_read_at_call():
    tensor = torch.ones(300_000)
    pending = statistics([tensor])
    tensor.zero_()
    assert pending.arrays()[0][0, 2] == 300_000


@pytest.mark.slow
def test_counts_past_two_to_24th():
    size = 2**24 + 5
    ones = torch.ones(size, dtype=torch.float16)
    ones[7] = 0
    floats, integers = statistics([ones], tier="eager").arrays()
    assert integers[0].tolist() == [1, size, 1, 0, 0]
    assert floats[0].tolist() == [math.sqrt(size - 1), 1.0, size - 1]


def test_counts_of_repeated_memory():
    tensor = torch.tensor([[0.0], [1.0], [NAN], [INF]]).expand(4, 2**33 + 1)
    assert statistics([tensor]).arrays()[1][0].tolist() == [1, 4 * 2**33 + 4, *[2**33 + 1] * 3]


def test_total_equals_torch_clipping():
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((300, 200), (7,), (1, 5, 9), ())]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    grads = [parameter.grad for parameter in parameters]
    total = np.linalg.norm(statistics(grads).arrays()[0][:, 0])
    np.testing.assert_allclose(total, float(torch.nn.utils.get_total_norm(grads)), rtol=1e-6)
    np.testing.assert_allclose(total, float(torch.nn.utils.clip_grad_norm_(parameters, math.inf)), rtol=1e-6)


@pytest.mark.slow
def test_modes_of_caller_are_unchanged(check):
    tensors = [torch.randn(5), torch.randn(200_000)]
    state = torch.get_rng_state()
    assert torch.is_grad_enabled()
    pending = statistics(tensors)
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    check(pending, tensors)
    SCRATCH.drop()
    with torch.inference_mode():
        check(statistics(tensors), tensors)
    check(statistics(tensors), tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(statistics(tensors), tensors)
    with torch.device("meta"):
        check(statistics(tensors), tensors)


def test_statistics_are_deterministic():
    tensors = [torch.randn(1_000_003), torch.randn(100, 7).t()[::2], torch.randn(9)]
    first, second = statistics(tensors).arrays(), statistics(tensors).arrays()
    assert (first[0] == second[0]).all()
    assert (first[1] == second[1]).all()


@pytest.mark.full
def test_statistics_on_several_threads(check):
    tensors = [torch.randn(3_000_003), torch.randn(9)]
    torch.set_num_threads(3)
    try:
        check(statistics(tensors), tensors)
    finally:
        torch.set_num_threads(1)
