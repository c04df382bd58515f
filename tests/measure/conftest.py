"""Reference statistics without torch: numpy on scaled values, and exact sums."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from backlight.measure.stats import packed_matrices
from backlight.measure.stats import statistics as module

Row = tuple[tuple[float, float, float], tuple[int, int, int, int, int]]


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    dense = dense.resolve_conj().resolve_neg().cpu()
    kind = torch.complex128 if dense.is_complex() else torch.float64
    return dense.to(kind).contiguous().numpy().reshape(-1)


def row_of(tensor: torch.Tensor | None) -> Row:
    """Return norm, max_abs, sum | measured, numel, zeros, nan, inf."""
    if tensor is None:
        return (0.0, 0.0, 0.0), (0, 0, 0, 0, 0)
    values = _numbers(tensor)
    parts = np.stack((values.real, values.imag)) if np.iscomplexobj(values) else values[None]
    nan, inf = np.isnan(parts).any(0).sum(), np.isinf(parts).any(0).sum()
    counts = (1, values.size, int((parts == 0).all(0).sum()), int(nan), int(inf))
    if nan or inf:
        with np.errstate(invalid="ignore"):
            return (math.nan if nan else math.inf,) * 2 + (float(np.sum(parts[0])),), counts
    largest = float(np.hypot.reduce(parts, axis=0).max(initial=0.0))
    scaled = (parts / (largest or 1.0)).reshape(-1)
    return (math.sqrt(math.fsum(scaled * scaled)) * largest, largest, math.fsum(parts[0])), counts


def assert_rows(pending: "module.Pending", tensors: list[torch.Tensor | None], rtol: float = 1e-12) -> None:
    """Check every number of a result against :func:`row_of`; sums relative to the sum of magnitudes."""
    floats, integers = pending.arrays()
    assert floats.dtype == np.float64
    assert integers.dtype == np.int64
    assert floats.shape == (len(tensors), 3)
    for i, tensor in enumerate(tensors):
        (norm, largest, total), counts = row_of(tensor)
        assert tuple(integers[i]) == counts, (i, tensor)
        np.testing.assert_allclose(floats[i, :2], (norm, largest), rtol=rtol, atol=0)
        finite = 0.0 if tensor is None else np.nansum(np.abs(_numbers(tensor)), dtype=np.float64)
        slack = rtol * float(finite) if math.isfinite(finite) else 0.0
        np.testing.assert_allclose(floats[i, 2], total, rtol=rtol, atol=slack)


@pytest.fixture(scope="session")
def oracle() -> Callable[[torch.Tensor | None], Row]:
    return row_of


@pytest.fixture(scope="session")
def check() -> Callable[..., None]:
    return assert_rows


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Treat host memory like that of an accelerator: no synchronisation."""
    for owner in (module, packed_matrices):
        monkeypatch.setattr(owner, "is_host", lambda device: False)
    return


@pytest.fixture
def kinds() -> list[torch.Tensor | None]:
    """Return gradients of every kind of type, layout and value."""
    bad = torch.tensor([math.nan, math.inf, 1.0])
    return [
        *(torch.randn(300, 500).to(d) for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16)),
        torch.randn(50, 40).t()[::3],
        torch.randn(7, dtype=torch.complex64),
        bad,
        bad.double(),
        torch.cat((torch.randn(300_000), bad, torch.zeros(1))),
        torch.full((200_000,), 1e20),
        torch.full((200_000,), 1e-30),
        torch.empty(0),
        torch.ones(1).expand(9),
        torch.sparse_coo_tensor([[1, 1, 2]], [1.0, 2.0, 3.0], (5,), check_invariants=True),
        None,
    ]
