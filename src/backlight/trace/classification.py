"""What an event is, from its category and its name: device work, kind of operation, phase of the step.

Categories differ between versions of the profiler and vendors; kinds and phases come from the names
that torch, kernels and users write.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterable

from backlight.records import Phase

KERNEL = frozenset({"kernel", "concurrent_kernel"})
MEMCPY = frozenset({"gpu_memcpy", "memcpy"})
MEMSET = frozenset({"gpu_memset", "memset"})
MTIA = frozenset({"mtia_ccp_events"})
DEVICE = KERNEL | MEMCPY | MEMSET | MTIA
"""Categories of work on a device; annotations and synchronisation on the device's rows are none."""

MTIA_WAITS = frozenset({"event_wait", "event_record"})
"""Names of MTIA's device events that are no work."""

OPERATOR = frozenset({"cpu_op", "operator"})
RUNTIME = frozenset({
    "cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "hip_driver", "xpu_runtime", "mtia_runtime",
    "privateuse1_runtime", "privateuse1_driver",
})  # fmt: skip
PROFILER_RANGE = frozenset({"cuda_profiler_range"})
"""A kernel as CUPTI's range profiler ran it: with counters, and without its real times."""

ANNOTATION = frozenset({"user_annotation"})
PYTHON = frozenset({"python_function"})
HOST = OPERATOR | RUNTIME | ANNOTATION | PYTHON
"""Events of a host thread's tree of calls."""

ENGINE = "autograd::engine::evaluate_function: "
"""Prefix of the evaluation of one node of backward, before the node's name."""


class Kind(enum.StrEnum):
    """Kinds of operation; every operation has exactly one. A view changes only what describes a tensor."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    NORMALISATION = "normalisation"
    SOFTMAX_LOSS = "softmax and loss"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction and pooling"
    COPY = "copy and cast"
    HOST_COPY = "host copy"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"
    INDEXING = "indexing"
    VIEW = "view"
    OTHER = "other"


_LAYOUT = (
    r"nchwTo|nhwcTo|nhwcAddPadding|batched_transpose_|transpose_?(readwrite|kernel|nchw|cnhw)|"
    r"SubTensorOpWithCast|direct_copy|^dma_request$"
)
"""Device work that changes layout or type, whatever operator launches it."""

# The first match decides: special kinds come before those that they are made of. Names of generated kernels
# (Tensile, Inductor) list letters or operators that would match elsewhere, so they come first.
_KIND_PATTERNS: tuple[tuple[Kind, str], ...] = (
    (
        Kind.VIEW,
        r"^aten::(alias|as_strided|chunk|detach|diagonal|expand(_as)?|flatten|lift_fresh|mH|movedim|moveaxis|mT|"
        r"narrow|numpy_T|permute|ravel|real|imag|reshape(_as)?|_reshape_alias|select|slice|split(_with_sizes)?|"
        r"squeeze|swapaxes|swapdims|t|tensor_split|transpose|unbind|unflatten|unfold|_unsafe_view|unsqueeze|"
        r"view(_as)?(_real|_complex)?|[hvd]split|resolve_(conj|neg)|_?conj)_?$|"
        r"^(T|Alias|Detach|Permute|Reshape|ReshapeAlias|Squeeze|SqueezeView|Transpose|Unsqueeze|UnsafeView|View|"
        r"ViewAsReal|ViewAsComplex)Backward\d*$",
    ),
    (Kind.MATMUL, r"cijk_|^fc-dtype"),
    (
        Kind.COPY,
        r"triton_poi_fused_(_?(to_copy|clone|cat|stack|transpose|permute|view|unsafe_view|slice|expand)_)+\d+$|"
        rf"{_LAYOUT}|reshape_and_cache|store_?(kv_?)?cache",
    ),
    (Kind.ELEMENTWISE, r"triton_(poi|for)_|SubTensorOpWithScalar|^memset|rotary|\brope_"),
    (Kind.NORMALISATION, r"triton_(red|per)_.*(norm|rsqrt|var_mean)"),
    (Kind.SOFTMAX_LOSS, r"triton_(red|per)_.*(softmax|loss|logsumexp|nll)"),
    (Kind.REDUCTION, r"triton_(red|per)_"),
    (
        Kind.COMMUNICATION,
        r"nccl|rccl|gloo:|mscclpp|nvshmem|\bc10d::|_c10d_functional|record_param_comms|"
        r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|symm_mem|cross_device_reduce",
    ),
    (Kind.HOST_COPY, r"memcpy.*(htod|dtoh|host)|^copy ?(host|device ?to ?host)|pin_memory"),
    (Kind.ATTENTION, r"flash|fmha|attention|attn|sdpa|\bmha_|\bsage_fwd"),
    (
        Kind.NORMALISATION,
        r"(batch|layer|group|instance|rms|weight)_?norm|\bbn_[fb]w|welford|fused_norm|rowwisemoments|gammabeta",
    ),
    (
        Kind.SOFTMAX_LOSS,
        r"softmax|logsumexp|_loss|loss(backward)?\d*$|\bnll|nll_|cross_?entropy|kl_div|\bctc|ctc_",
    ),
    # A fused optimizer in the name of an embedding makes it no optimizer.
    (
        Kind.INDEXING,
        r"embedding|lookup|permute_?(pooled|sparse|\dd)|sparse_features|jagged|moe.*(routing|finalize)",
    ),
    (
        Kind.OPTIMIZER,
        r"multi_tensor_apply|multi_tensor_|adam|lamb\b|shampoo|adagrad|rmsprop|_foreach_|fused_sgd|"
        r"optimizer\.(step|zero_grad)",
    ),
    (
        Kind.COPY,
        r"catarray|memcpy|copy_kernel|"
        r"aten::(cat|copy_|clone|contiguous|to|_to_copy|stack)\b",
    ),
    (
        Kind.MATMUL,
        r"gemm|gemv|cutlass|nvjet|matmul|conv|winograd|cudnn|cask|xmma|miopen|wgrad|dgrad|splitk|triton_tem_|"
        r"fused_moe|(im2|vol2|im2d2|col2)(col|im|vol)|epilogue::impl|(\b|_)(mm|bmm|addmm|addbmm|baddbmm)(_|\b|backward)|"
        r"\b(linear|einsum|dot|mv|addmv)(backward)?\d*\b",
    ),
    (
        Kind.INDEXING,
        r"index|gather|scatter|nonzero|masked_(select|fill)|sort|topk|unique|take_along|one_hot|bucketize|"
        r"select(backward)?\d*\b|slice(backward)?\d*\b|getitem|(lengths|offsets)_range|DeviceSelect|"
        r"repeat_interleave|routing|to_dense|sampling|searchsorted",
    ),
    (Kind.COPY, r"quant"),
    (
        Kind.REDUCTION,
        r"reduce_(sum|mean|\w*kernel)|vector_norm|(max|min)_dim_|Device(Segmented)?(Reduce|Scan)|_pool|pool(ing)?(\d?d)?(backward)?\d*\b|cumsum|cumprod|"
        r"\b(sum|nansum|mean|amax|amin|argmax|argmin|max|min|all|any|prod|norm|linalg_vector_norm|std(?!::)|var|var_mean)"
        r"(backward)?\d*\b",
    ),
    (
        Kind.ELEMENTWISE,
        r"elementwise|pointwise|fillfunctor|act_and_mul|upsample|mul_const|"
        r"\b(add|sub|rsub|mul|multiply|div|divide|neg|exp|log|log2|log1p|logit|sqrt|rsqrt|pow|abs|sign|sin|cos|"
        r"clamp(_min|_max)?|where|relu|gelu|silu|elu|mish|softplus|hardswish|sigmoid|tanh|erf|dropout|"
        r"native_dropout|addcmul|addcdiv|lerp|fill|zero|zeros|ones|arange|tril|triu|nan_to_num|reciprocal|floor|"
        r"ceil|round|remainder|square|isnan|isfinite|logical_\w+|bitwise_\w+|threshold|hardtanh|leaky_relu|"
        r"maximum|minimum|eq|ne|lt|le|gt|ge|bernoulli|uniform|normal|random|exponential)"
        r"_?(_backward)?(backward)?\d*\b",
    ),
    (
        Kind.COPY,
        r"copy|\b(to|cast|toCopy|clone|cat|contiguous|transpose|roll|flip|constant_pad_nd|repeat)"
        r"(backward)?\d*\b",
    ),
)  # fmt: skip
_COMPILED_KINDS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KIND_PATTERNS)

KINDS = tuple(Kind)
"""A kind is stored as its index in this tuple."""

MODULE = "nn.Module: "
"""Prefix of the range of a module's call in traces with stacks, before its class and a number."""

_OWN_KIND = re.compile(
    rf"^mem(cpy|set)|nccl|rccl|all_?reduce|cross_device_reduce|SubTensorOpWithScalar|{_LAYOUT}", re.IGNORECASE
)


def has_own_kind(name: str) -> bool:
    """Return whether device work is of its own kind, not of the operator's that launched it.

    These are copies, fills, changes of the layout and collectives, also inside a convolution.
    """
    return bool(_OWN_KIND.search(name[:400]))


def kind_of(name: str) -> Kind:
    """Return the kind of an operator (``aten::addmm``, ``AddmmBackward0``), module or kernel by its name.

    Names of kernels are long templates: only the first 400 characters count.
    """
    text = name.removeprefix(ENGINE).removeprefix(MODULE)[:400]
    text = text.replace("fbgemm", "")  # the name of a library, not of the operation
    if name.startswith(MODULE):
        text = text.rpartition("_")[0]
    for kind, pattern in _COMPILED_KINDS:
        if pattern.search(text):
            return kind
    return Kind.OTHER


def short(name: str, width: int = 60) -> str:
    """Return the name of a kernel without return type, namespaces' arguments and template arguments."""
    text = _whole(name)
    bare = re.split(r"[<(]", text, maxsplit=1)[0].strip() or text
    if bare.endswith(("elementwise_kernel", "reduce_kernel", "multi_tensor_apply_kernel")):
        inner = text[len(bare) :]
        match = re.search(r"\w+_kernel_(?:cuda|impl)\w*", inner) or re.search(r"\w*(?:Functor|Ops)\w*", inner)
        bare = f"{bare.rpartition('::')[2]} [{match[0]}]" if match else bare
    return bare if len(bare) <= width else bare[: width - 1] + "…"


def distinct_names(names: Iterable[str]) -> dict[str, str]:
    """Return each name in short; those that would be equal keep their template arguments."""
    brief = {name: short(name) for name in names}
    times = Counter(brief.values())
    return {name: text if times[text] == 1 else _whole(name) for name, text in brief.items()}


def _whole(name: str) -> str:
    text = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return text.rpartition(">::type ")[2] if text.startswith("std::enable_if") else text


PHASES = tuple(Phase)
"""A phase is stored as its index in this tuple."""

_PHASE_PATTERNS = tuple(
    (phase, re.compile(pattern, re.IGNORECASE))
    for phase, pattern in (
        (Phase.BACKWARD, r"^autograd::engine::evaluate_function|^\W*(loss\.)?backward( pass)?\W*$"),
        (
            Phase.OPTIMIZER,
            r"^Optimizer\.(step|zero_grad)#|^\W*(optimizer|optim)(\.step|\.zero_grad| step)?\W*$",
        ),
        (
            Phase.DATA,
            r"^enumerate\(DataLoader\)|dataloader\.py\(\d+\): __next__|^\W*(data|data_?load(ing|er)?)\W*$",
        ),
        (Phase.CLIP, r"clip_grad"),
        (Phase.FORWARD, r"^\W*forward( pass)?\W*$|^(Distributed|FullySharded)DataParallel\.forward$"),
        (Phase.EVALUATION, r"^\W*(eval|evaluation|validation|validate)\W*$"),
        (Phase.CHECKPOINT, r"^\W*(save|saving)?[ _]?checkpoint(ing)?\W*$"),
        (Phase.LOSS, r"^aten::\w*(_loss|cross_entropy_loss|kl_div|ctc_loss)(_nd|2d)?$|^\W*loss\W*$"),
    )
)

LAYOUTS = {None: "-", True: "same", False: "differs"}
"""What a table says of the memory order of a copy next to that of its source, by whether they are equal."""


def phase_of(name: str) -> Phase | None:
    """Return the phase that a name marks, None if it marks none; ``backlight:forward`` marks forward."""
    if name.startswith("backlight:"):
        wanted = name.removeprefix("backlight:")
        return Phase(wanted) if wanted in set(Phase) else None
    for phase, pattern in _PHASE_PATTERNS:
        if pattern.search(name):
            return phase
    return None
