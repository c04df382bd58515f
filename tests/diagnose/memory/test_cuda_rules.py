"""The rules of CUDA on tensors of the CPU, against CUDA's own kernels on fake tensors of a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from backlight.diagnose.memory.cuda_rules import EFFICIENT, FLASH, MATH, CudaRules
from backlight.diagnose.memory.prediction import predict_step

Make = Callable[..., Tensor]

CALLS: dict[str, Callable[[Make], Any]] = {
    # float32
    "layer_norm": lambda x: F.layer_norm(x(4, 8), (8,), x(8), x(8)),
    "group_norm": lambda x: F.group_norm(x(2, 8, 3), 4),
    "rms_norm": lambda x: F.rms_norm(x(4, 8), (8,), x(8)),
    "exp": lambda x: x(4).exp(),
    "log": lambda x: x(4).log(),
    "pow": lambda x: x(4).pow(2),
    "rpow": lambda x: 2 ** x(4),
    "pow of two": lambda x: x(4) ** x(4),
    "rsqrt": lambda x: x(4).rsqrt(),
    "reciprocal": lambda x: x(4).reciprocal(),
    "softplus": lambda x: F.softplus(x(4)),
    "norm": lambda x: x(4, 8).norm(),
    "norm of a dimension": lambda x: x(4, 8).norm(dim=1),
    "dist": lambda x: torch.dist(x(4), x(4)),
    "cdist": lambda x: torch.cdist(x(4, 8), x(4, 8)),
    "logsumexp": lambda x: x(4, 8).logsumexp(1),
    "cosine_similarity": lambda x: F.cosine_similarity(x(4, 8), x(4, 8)),
    "mse_loss": lambda x: F.mse_loss(x(4), x(4)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x(4), x(4)),
    "cross_entropy": lambda x: F.cross_entropy(x(4, 8), torch.zeros(4, dtype=torch.long, device=x(1).device)),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x(4), x(4)),
    "interpolate": lambda x: F.interpolate(x(1, 2, 4, 4), scale_factor=2.0, mode="bilinear"),
    # float32 result
    "softmax": lambda x: x(4, 8).softmax(-1),
    "softmax of a chosen type": lambda x: torch.softmax(x(4, 8), -1, torch.float64),
    "log_softmax": lambda x: x(4, 8).log_softmax(-1),
    "sum": lambda x: x(4, 8).sum(),
    "sum of a dimension": lambda x: x(4, 8).sum(1, keepdim=True),
    "prod": lambda x: x(4, 8).prod(),
    "cumsum": lambda x: x(4, 8).cumsum(1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x(4, 8), dim=1),
    "whole numbers": lambda x: torch.ones(4, dtype=torch.long, device=x(1).device).sum(),
    # lower precision
    "linear": lambda x: F.linear(x(4, 8), x(8, 8), x(8)),
    "matmul": lambda x: x(4, 8) @ x(8, 4),
    "bmm": lambda x: torch.bmm(x(2, 4, 8), x(2, 8, 4)),
    "mv": lambda x: torch.mv(x(4, 8), x(8)),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x(4, 8), x(8, 4)),
    "conv2d": lambda x: F.conv2d(x(1, 2, 8, 8), x(4, 2, 3, 3)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x(1, 2, 8, 8), x(2, 4, 3, 3)),
    "prelu": lambda x: F.prelu(x(4, 8), x(8)),
    # the widest
    "addcmul": lambda x: torch.addcmul(x(4), x(4), x(4).float()),
    "addcdiv": lambda x: torch.addcdiv(x(4), x(4), x(4)),
    "bilinear": lambda x: F.bilinear(x(4, 8), x(4, 8), x(2, 8, 8).float()),
    "dot": lambda x: torch.dot(x(4), x(4)),
    "scatter_add": lambda x: x(4).scatter_add(0, torch.zeros(4, dtype=torch.long, device=x(1).device), x(4)),
    # none of autocast, on CUDA
    "gelu": lambda x: F.gelu(x(4)),
    "relu": lambda x: F.relu(x(4)),
    "cat": lambda x: torch.cat([x(4), x(4)]),
    "stack": lambda x: torch.stack([x(4), x(4)]),
    "batch_norm": lambda x: F.batch_norm(x(4, 8), None, None, training=True),
    "mean": lambda x: x(4, 8).mean(1),
    "max_pool3d": lambda x: F.max_pool3d(x(1, 2, 4, 4, 4), 2),
    "pad": lambda x: F.pad(x(1, 2, 4), (1, 1), mode="reflect"),
    "fft": lambda x: torch.fft.rfft(x(8).float()),
}

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def types_of(call: Callable[[Make], Any], device: str, dtype: torch.dtype, region: torch.dtype) -> str:
    def make(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, region)
    try:
        with FakeTensorMode():
            return str(call(make).dtype)
    except (RuntimeError, NotImplementedError) as error:
        return type(error).__name__
    finally:
        torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()


@pytest.mark.parametrize("region", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_autocast_gives_the_types_of_cuda(name: str, region: torch.dtype) -> None:
    """torch's own kernels for CUDA run on fake tensors of a GPU, also where there is none."""
    expected = [types_of(CALLS[name], "cuda", dtype, region) for dtype in TYPES]
    with CudaRules():
        found = [types_of(CALLS[name], "cpu", dtype, region) for dtype in TYPES]
    # A float16 in a region of bfloat16, which some operations of CUDA refuse, has no type there.
    pairs = [(one, other) for one, other in zip(found, expected, strict=True) if other.startswith("torch.")]
    assert len(pairs) > 1
    assert [one for one, _ in pairs] == [other for _, other in pairs]


def test_the_lists_of_cpu_and_cuda_differ_and_come_back() -> None:
    before = types_of(CALLS["layer_norm"], "cpu", torch.bfloat16, torch.bfloat16)
    with CudaRules():
        within = types_of(CALLS["layer_norm"], "cpu", torch.bfloat16, torch.bfloat16)
    after = types_of(CALLS["layer_norm"], "cpu", torch.bfloat16, torch.bfloat16)
    assert (before, within, after) == ("torch.bfloat16", "torch.float32", "torch.bfloat16")


def test_region_for_cuda_holds_without_a_gpu() -> None:
    linear = nn.Linear(4, 4)
    with CudaRules() as rules:
        assert rules.assumed == ()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.autocast("cuda"):
                assert torch.is_autocast_enabled()
                assert torch.get_autocast_dtype("cuda") is torch.float16
                assert linear(torch.ones(2, 4)).dtype is torch.float16
            with torch.autocast("cuda", torch.bfloat16), torch.autocast("cuda", enabled=False):
                assert linear(torch.ones(2, 4)).dtype is torch.float32
        assert not torch.is_autocast_enabled()
    assert rules.assumed == ("autocast by the list of CUDA, not by that of the CPU",)
    with pytest.warns(UserWarning, match="CUDA is not available"), torch.autocast("cuda"):
        assert linear(torch.ones(2, 4)).dtype is torch.float32


def attended(dtype: torch.dtype, head: int = 64, *, mask: bool = False, **options: Any) -> str:
    with FakeTensorMode(), CudaRules() as rules:
        query = torch.empty(2, 4, 16, head, dtype=dtype, requires_grad=True)
        given = torch.ones(16, 16, dtype=torch.bool) if mask else None
        result = F.scaled_dot_product_attention(query, query, query, given, **options)
        assert (result.shape, result.dtype) == (query.shape, dtype)
        result.sum().backward()
        assert query.grad is not None
    (kernel,) = rules.attention
    return kernel


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": torch.bfloat16, "dropout_p": 0.1}, FLASH),
        ({"dtype": torch.float16, "is_causal": True}, FLASH),
        ({"dtype": torch.bfloat16, "head": 320}, EFFICIENT),
        ({"dtype": torch.bfloat16, "mask": True}, EFFICIENT),
        ({"dtype": torch.float32, "dropout_p": 0.1}, EFFICIENT),
        ({"dtype": torch.float32, "head": 62}, MATH),
        ({"dtype": torch.float64}, MATH),
    ],
    ids=str,
)
def test_attention_takes_the_kernel_of_cuda(options: dict[str, Any], expected: str) -> None:
    assert attended(**options) == expected


def test_a_script_may_choose_the_kernel() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attended(torch.bfloat16) == MATH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def predicted(device: str, region: str | None) -> Any:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(region or "cpu", torch.bfloat16, enabled=region is not None):
            return model(x).float().square().mean()  # type: ignore[no-any-return]

    return predict_step(
        lambda: nn.Sequential(Block(), Block()), lambda: torch.ones(2, 256, 64), loss, None, device=device
    )


WEIGHTS = 2 * 4 * 256 * 256
"""Elements of the weights of attention of one block."""


def test_prediction_for_cuda_keeps_no_weights_of_attention() -> None:
    cuda = predicted("cuda", "cuda")
    assert cuda.assumed == (
        "autocast by the list of CUDA, not by that of the CPU",
        "kernels of attention: flash for 2 calls",
    )
    assert max(group.bytes // group.count for group in cuda.largest) < WEIGHTS
    cpu = predicted("cpu", "cpu")
    assert cpu.assumed == ()
    assert max(group.bytes // group.count for group in cpu.largest) >= 2 * WEIGHTS
    assert cuda.peak < cpu.peak
    assert predicted("cuda", None).assumed == ("kernels of attention: memory-efficient for 2 calls",)


@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("train", [True, False])
def test_dropout_keeps_a_mask_of_bytes(p: float, train: bool) -> None:
    """Those of the CPU are numbers: a prediction was 27 % too high."""
    kept: list[Tensor] = []
    x = torch.ones(4, 8, requires_grad=True)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with CudaRules(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        dropped = F.dropout(x, p, train)
    assert {tensor.dtype for tensor in kept if tensor.numel() > 1} == (
        {torch.bool} if train and p == 0.1 else set()
    )
    if not train or p == 0:
        assert torch.equal(dropped, x)
    elif p == 1:
        assert not dropped.any()
    else:
        assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.9).item()}


def test_a_recipe_for_the_cpu_is_predicted_as_on_cuda() -> None:
    assert predicted("cuda", "cpu").peak == predicted("cuda", "cuda").peak


@pytest.mark.parametrize("chosen", [None, False, True])
def test_optimizer_takes_all_parameters_at_once_where_it_may(chosen: bool | None) -> None:
    """Adam then makes a copy of all weights at once: the peak of a small batch."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), foreach=chosen)

    def prediction(device: str) -> Any:
        return predict_step(
            lambda: nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))),
            lambda: torch.ones(1, 256), lambda m, x: m(x).sum(), optimizer, device=device,
        )  # fmt: skip

    weights = 8 * 256 * 256 * 4
    cuda, cpu = prediction("cuda"), prediction("cpu")
    assert cuda.peak > 4 * weights
    assert (cuda.peak > 4.9 * weights) is (chosen is not False)
    assert (cpu.peak > 4.9 * weights) is (chosen is True)
    words = ("optimizer over all parameters at once (foreach)",) if chosen is None else ()
    assert cuda.assumed == words
