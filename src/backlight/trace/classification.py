"""What an event is, from its category and its name: device work, kind of operation, phase of the step.

Categories differ between versions of the profiler and vendors; kinds and phases come from the names
that torch, kernels and users write.
"""

from __future__ import annotations

import enum
import re

from backlight.records import Phase

KERNEL = frozenset({"kernel", "concurrent_kernel"})
MEMCPY = frozenset({"gpu_memcpy", "memcpy"})
MEMSET = frozenset({"gpu_memset", "memset"})
DEVICE = KERNEL | MEMCPY | MEMSET
"""Work on a device; annotations and synchronisation on the device's rows are none."""

OPERATOR = frozenset({"cpu_op", "operator"})
RUNTIME = frozenset({
    "cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "hip_driver", "xpu_runtime", "mtia_runtime",
    "privateuse1_runtime", "privateuse1_driver",
})  # fmt: skip
ANNOTATION = frozenset({"user_annotation"})
PYTHON = frozenset({"python_function"})
HOST = OPERATOR | RUNTIME | ANNOTATION | PYTHON
"""Events of a host thread's tree of calls."""

ENGINE = "autograd::engine::evaluate_function: "
"""Prefix of the evaluation of one node of backward, before the node's name."""


class Kind(enum.StrEnum):
    """Kinds of operation; every operation has exactly one."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    NORMALISATION = "normalisation"
    SOFTMAX_LOSS = "softmax and loss"
    ELEMENTWISE = "elementwise"
    COPY = "copy and cast"
    HOST_COPY = "host copy"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"
    INDEXING = "indexing"
    OTHER = "other"


# The first match decides: special kinds come before those that they are made of.
_KIND_PATTERNS: tuple[tuple[Kind, str], ...] = (
    (
        Kind.COMMUNICATION,
        r"nccl|rccl|gloo:|mscclpp|nvshmem|\bc10d::|_c10d_functional|record_param_comms|"
        r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|symm_mem",
    ),
    (Kind.HOST_COPY, r"memcpy.*(htod|dtoh|host)|^copy ?(host|device ?to ?host)|pin_memory"),
    (Kind.ATTENTION, r"flash|fmha|attention|attn|sdpa|\bmha_"),
    (Kind.NORMALISATION, r"(batch|layer|group|instance|rms|weight)_?norm|\bbn_[fb]w|welford|fused_norm"),
    (Kind.SOFTMAX_LOSS, r"softmax|_loss|loss(backward)?\d*$|nll|cross_?entropy|kl_div|ctc"),
    (Kind.INDEXING, r"embedding|permute_(pooled|\dd)"),  # a fused optimizer in its name makes it no optimizer
    (
        Kind.OPTIMIZER,
        r"multi_tensor_apply|multi_tensor_|adam|lamb\b|shampoo|adagrad|rmsprop|_foreach_|fused_sgd|"
        r"optimizer\.(step|zero_grad)",
    ),
    (
        Kind.COPY,
        r"direct_copy|catarray|memcpy|copy_kernel|"
        r"aten::(cat|copy_|clone|contiguous|to|_to_copy|stack)\b",
    ),
    (
        Kind.MATMUL,
        r"gemm|gemv|cutlass|cijk_|nvjet|matmul|conv|winograd|cudnn|cask|xmma|miopen|wgrad|dgrad|"
        r"\b(mm|bmm|addmm|addbmm|baddbmm|linear|einsum|dot|mv|addmv)(backward)?\d*\b|triton_.*_mm",
    ),
    (
        Kind.INDEXING,
        r"index|gather|scatter|nonzero|masked_(select|fill)|sort|topk|unique|take_along|one_hot|"
        r"select(backward)?\d*\b|slice(backward)?\d*\b|getitem",
    ),
    (
        Kind.ELEMENTWISE,
        r"elementwise|pointwise|triton_poi|fillfunctor|"
        r"\b(add|sub|rsub|mul|div|neg|exp|log|sqrt|rsqrt|pow|abs|sign|clamp|where|relu|gelu|silu|sigmoid|tanh|dropout|"
        r"native_dropout|addcmul|addcdiv|lerp|fill|zero|zeros|ones|threshold|hardtanh|leaky_relu|maximum|minimum|"
        r"eq|ne|lt|le|gt|ge|bernoulli|uniform|normal)_?(_backward)?(backward)?\d*\b",
    ),
    (Kind.COPY, r"copy|\b(to|cast|toCopy|tocopy|clone|cat|contiguous|transpose)(backward)?\d*\b"),
)  # fmt: skip
_COMPILED_KINDS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KIND_PATTERNS)

KINDS = tuple(Kind)
"""A kind is stored as its index in this tuple."""


def kind_of(name: str) -> Kind:
    """Return the kind of an operator (``aten::addmm``, ``AddmmBackward0``) or kernel by its name.

    Names of kernels are long templates: only the first 400 characters count.
    """
    text = name.removeprefix(ENGINE)[:400].replace(
        "fbgemm", ""
    )  # the name of a library, not of the operation
    for kind, pattern in _COMPILED_KINDS:
        if pattern.search(text):
            return kind
    return Kind.OTHER


def short(name: str, width: int = 60) -> str:
    """Return the name of a kernel without return type, namespaces' arguments and template arguments."""
    text = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    bare = re.split(r"[<(]", text, maxsplit=1)[0] or text
    if bare.endswith(("elementwise_kernel", "reduce_kernel", "multi_tensor_apply_kernel")):
        inner = text[len(bare) :]
        found = re.search(r"\w+_kernel_(?:cuda|impl)\w*", inner) or re.search(r"\w*(?:Functor|Ops)\w*", inner)
        bare = f"{bare.rpartition('::')[2]} [{found[0]}]" if found else bare
    return bare if len(bare) <= width else bare[: width - 1] + "…"


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


def phase_of(name: str) -> Phase | None:
    """Return the phase that a name marks, None if it marks none; ``backlight:forward`` marks forward."""
    if name.startswith("backlight:"):
        wanted = name.removeprefix("backlight:")
        return Phase(wanted) if wanted in set(Phase) else None
    for phase, pattern in _PHASE_PATTERNS:
        if pattern.search(name):
            return phase
    return None
