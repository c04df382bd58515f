"""Kinds of operations: by operator, by name, on made and on real traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.trace.analysis import RankAnalysis, analyse
from backlight.trace.classification import Kind, kind_of
from backlight.trace.reader import read_trace
from synthetic_traces import REAL, SKIP_REASON, TraceBuilder, write

GEMM = "ampere_sgemm_128x64_tn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
TENSILE = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x32x64_MI16x16x1_NTD_ONLL1_PGR2_PLR1"
TRANSPOSE = "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(nchw2nhwc_params_t)"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1>>"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (NCCL, Kind.COMMUNICATION),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", Kind.COMMUNICATION),
        ("rcclGenericKernel_AllReduce", Kind.COMMUNICATION),
        ("gloo:all_reduce", Kind.COMMUNICATION),
        (GEMM, Kind.MATMUL),
        ("Cijk_Ailk_Bljk_SB_MT64x16x32", Kind.MATMUL),
        (TENSILE, Kind.MATMUL),
        ("nvjet_hsh_128x256", Kind.MATMUL),
        ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3", Kind.MATMUL),
        ("aten::_scaled_mm", Kind.MATMUL),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", Kind.MATMUL),
        ("aten::addmm", Kind.MATMUL),
        ("autograd::engine::evaluate_function: AddmmBackward0", Kind.MATMUL),
        ("aten::convolution", Kind.MATMUL),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", Kind.ATTENTION),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80", Kind.ATTENTION),
        ("aten::scaled_dot_product_attention", Kind.ATTENTION),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW", Kind.NORMALISATION),
        ("aten::native_layer_norm", Kind.NORMALISATION),
        ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>", Kind.NORMALISATION),
        ("void at::native::GammaBetaBackwardCUDAKernelTemplate<float, float, 64>", Kind.NORMALISATION),
        ("void at::native::im2col_kernel<float>", Kind.MATMUL),
        ("void cublasLt::epilogue::impl::globalKernel<8, 32, float>", Kind.MATMUL),
        ("void softmax_warp_forward<float, float>", Kind.SOFTMAX_LOSS),
        ("aten::mse_loss", Kind.SOFTMAX_LOSS),
        ("void at::native::nll_loss_forward_reduce_cuda", Kind.SOFTMAX_LOSS),
        (ADD, Kind.ELEMENTWISE),
        (FILL, Kind.ELEMENTWISE),
        ("divide-dtype_Float", Kind.ELEMENTWISE),
        ("dma_request", Kind.COPY),
        ("Memset (Device)", Kind.ELEMENTWISE),
        ("_C::rotary_embedding", Kind.ELEMENTWISE),
        ("aten::mean", Kind.REDUCTION),
        ("aten::max_pool2d_with_indices", Kind.REDUCTION),
        ("triton_red_fused_sum_3", Kind.REDUCTION),
        ("triton_per_fused_add_mean_mul_pow_rsqrt_8", Kind.NORMALISATION),
        ("triton_poi_fused_scaled_dot_product_flash_attention_add_10", Kind.ELEMENTWISE),
        ("triton_poi_fused__to_copy_1", Kind.COPY),
        (TRANSPOSE, Kind.COPY),
        ("nn.Module: LayerNorm_3", Kind.NORMALISATION),
        ("nn.Module: Linear_12", Kind.MATMUL),
        ("triton_poi_fused_add_relu_0", Kind.ELEMENTWISE),
        ("aten::gelu", Kind.ELEMENTWISE),
        ("void at::native::elementwise_kernel<128, 2, direct_copy_kernel_cuda>", Kind.COPY),
        ("aten::_to_copy", Kind.COPY),
        ("Memcpy DtoD (Device -> Device)", Kind.COPY),
        ("Memcpy HtoD (Pageable -> Device)", Kind.HOST_COPY),
        ("Memcpy DtoH (Device -> Pinned)", Kind.HOST_COPY),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", Kind.OPTIMIZER),
        ("aten::_foreach_addcdiv_", Kind.OPTIMIZER),
        ("aten::embedding_dense_backward", Kind.INDEXING),
        ("void fbgemm_gpu::permute_2D_data_kernel<false>", Kind.INDEXING),
        ("aten::index_select", Kind.INDEXING),
        ("aten::transpose", Kind.VIEW),
        ("aten::t", Kind.VIEW),
        ("aten::as_strided", Kind.VIEW),
        ("aten::select", Kind.VIEW),
        ("aten::unsqueeze_", Kind.VIEW),
        ("autograd::engine::evaluate_function: TransposeBackward0", Kind.VIEW),
        ("autograd::engine::evaluate_function: SelectBackward0", Kind.INDEXING),  # fills a whole gradient
        ("void batched_transpose_32x32_dword", Kind.COPY),
        ("aten::contiguous", Kind.COPY),
        ("aten::empty", Kind.OTHER),
        ("ProfilerStep#3", Kind.OTHER),
    ],
)  # fmt: skip
def test_kinds(name: str, kind: Kind) -> None:
    assert kind_of(name) is kind


@pytest.fixture
def kinds_of(tmp_path: Path) -> Callable[[TraceBuilder], list[str]]:
    def kinds_of(builder: TraceBuilder) -> list[str]:
        found: RankAnalysis = analyse([read_trace(builder.write(tmp_path / "made.json"))]).traces[0]
        return [row.kind for row in found.kernels]

    return kinds_of


@pytest.mark.parametrize(
    ("operator", "kernel", "category", "kind"),
    [
        ("aten::addmm", "opaque_kernel_7", "kernel", Kind.MATMUL),  # the name says nothing
        ("aten::_softmax", GEMM, "kernel", Kind.SOFTMAX_LOSS),  # the operator decides
        ("vllm::moe_forward", GEMM, "kernel", Kind.MATMUL),  # the operator says nothing
        ("aten::cudnn_convolution", TRANSPOSE, "kernel", Kind.COPY),
        ("aten::cudnn_convolution", "Memset (Device)", "gpu_memset", Kind.ELEMENTWISE),
        ("aten::copy_", "Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", Kind.HOST_COPY),
        ("custom::layer", "opaque_kernel_7", "kernel", Kind.NORMALISATION),  # of the module around
        ("aten::reshape", ADD, "kernel", Kind.ELEMENTWISE),  # a view launches nothing itself
    ],
)
def test_launching_operator_decides(
    operator: str, kernel: str, category: str, kind: Kind, kinds_of: Callable[[TraceBuilder], list[str]]
) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    builder.add("python_function", "nn.Module: LayerNorm_3", 5, 200)
    builder.operator(operator, 10, 100)
    builder.kernel(kernel, 20, 40, 50, category=category)
    assert kinds_of(builder) == [kind.value]


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=SKIP_REASON)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mi300_vit", {"matmul": 0.57, "attention": 0.22, "softmax and loss": 0.0}),
        ("b200_eager", {"matmul": 0.51, "communication": 0.18}),
        ("amd_mi250", {}),
        ("alexnet", {"host copy": 0.84}),
        ("training_one_gpu", {"matmul": 0.64, "normalisation": 0.18}),
        ("two_ranks_rank-0", {"communication": 0.61}),
        ("two_ranks_rank-1", {"communication": 0.52}),
    ],
)
def test_kinds_of_real_traces(name: str, expected: dict[str, float]) -> None:
    found = analyse([read_trace(REAL / f"{name}.json.gz")]).traces[0]
    kinds = {row.name: row.share for row in found.kinds}
    assert kinds.get("other", 0) <= 0.05
    for kind, share in expected.items():
        assert kinds.get(kind, 0) == pytest.approx(share, abs=0.01)


def test_amd_names_are_classified(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 100)
    builder.kernel("Cijk_Ailk_Bljk", 10, 30, 20, call="hipLaunchKernel", kind="Dispatch Kernel")
    builder.add("cuda_runtime", "hipMemcpyWithStream", 55, 10, stream="0x0")
    found = analyse([read_trace(write(tmp_path / "made.json", builder.events))]).traces[0]
    assert found.kernels[0].kind == "matmul"
    assert found.rank is None


def test_events_of_mtia_are_device_work(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.step(1, 0, 100)
    for name, start in (("fc-dtype_Float", 10), ("dma_request", 30), ("event_wait", 50)):
        builder.add("mtia_ccp_events", name, start, 10, pid=17, tid=3, stream=1)
    found = analyse([read_trace(builder.write(tmp_path / "made.json"))]).traces[0]
    assert {row.name: row.kind for row in found.kernels} == {
        "fc-dtype_Float": "matmul", "dma_request": "copy and cast",
    }  # fmt: skip
    assert found.steps[0].busy == 20_000


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=SKIP_REASON)
def test_real_mtia_trace_has_device_time() -> None:
    found = analyse([read_trace(REAL / "mtia_inference.json.gz")]).traces[0]
    assert set(found.devices) == {17}
    assert sum(row.calls for row in found.kernels) == 877 + 37 + 36 + 24
