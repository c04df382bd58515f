"""An account of memory as JSON types: what ``backlight memory --json`` prints and a run stores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from backlight.diagnose.memory.account import Account
from backlight.diagnose.memory.prediction_result import COMMUNICATION, CONTEXT, Flops, Logits, Prediction
from backlight.diagnose.memory.storage_log import Kind

if TYPE_CHECKING:
    from backlight.diagnose.memory.batch_search import Fit, Saving
    from backlight.diagnose.memory.measure import Measured

LARGEST = 20
"""Tensors of the live set that are listed."""

NOT_SEEN = (
    "what kernels allocate and free inside themselves (workspaces of convolutions and matrix products)",
    "memory outside of torch's tensors (numpy, the CUDA context, communication), and in worker processes",
)
"""What no recording of this kind sees."""

NOT_PREDICTED = (
    "workspaces of kernels (LSTM and convolution backward of the CPU library are the large ones)",
    "other kernels: attention, recurrent and normalisation layers of another device may keep other tensors",
    "compiled code, which may keep less",
)


def measured_answer(measured: Measured) -> dict[str, Any]:
    """Return a measurement as JSON types; what was not measured is null."""
    allocator = measured.allocator
    return {
        "how": "measured",
        "exit_code": measured.code,
        "steps": measured.steps,
        "warmup": measured.warmup,
        "device": measured.device,
        "parameters": measured.parameters,
        **_account(measured.account),
        "flops": _flops(measured.flops),
        "logits": _logits(measured.logits),
        "allocator": None
        if allocator is None
        else {
            "allocated_peak": allocator.allocated,
            "reserved_peak": allocator.reserved,
            "inactive_split": allocator.split,
            "fragmentation": allocator.fragmentation,
            "retries": allocator.retries,
            "failures": allocator.failures,
        },
        "not_seen": list(NOT_SEEN),
        "trouble": list(measured.trouble),
    }


def predicted_answer(prediction: Prediction, savings: Sequence[Saving], fit: Fit | None) -> dict[str, Any]:
    """Return a prediction as JSON types; what was not asked for is null."""
    return {
        "how": "predicted",
        "built": prediction.built,
        "seconds": prediction.seconds,
        "parameters": prediction.parameters,
        "trainable": prediction.trainable,
        "peak_unrounded": prediction.exact,
        **_account(prediction.account),
        "flops": _flops(prediction.flops),
        "logits": _logits(prediction.logits),
        "besides": {
            "context": list(CONTEXT),
            "communication": list(COMMUNICATION),
            "ddp_buckets": [0, sum_of_gradients(prediction)],
        },
        "blocks": [{"parent": b.parent, "type": b.type, "names": list(b.names)} for b in prediction.blocks],
        "checkpointing": [
            {
                "parent": s.blocks.parent,
                "type": s.blocks.type,
                "wrapped": list(s.wrapped),
                "peak": s.peak,
                "saved": s.saved,
                "recomputed_flops": s.flops,
                "share_of_step": s.share,
            }
            for s in savings
        ],
        "fit": None
        if fit is None
        else {
            "setting": fit.setting,
            "budget": fit.budget,
            "batch": fit.batch,
            "peak": fit.peak,
            "above": fit.above,
            "peak_above": fit.peak_above,
            "tried": [{"batch": batch, "peak": peak} for batch, peak in fit.tried],
        },
        "not_seen": list(NOT_PREDICTED),
    }


def sum_of_gradients(prediction: Prediction) -> int:
    """Return the bytes of all gradients of a step: what DDP's buckets take where they are no views."""
    ledger = prediction.account.ledger
    born = {event - 1 for event in ledger.events[prediction.account.start :] if event > 0}
    return sum(s.nbytes for i, s in enumerate(ledger.storages) if i in born and s.kind is Kind.GRADIENTS)


def _account(account: Account) -> dict[str, Any]:
    return {
        "peak": account.peak,
        "rounded_to": account.granule,
        "between_steps": account.begin,
        "phase_at_peak": account.phase,
        "kinds": {kind.value: nbytes for kind, nbytes in account.kinds().items()},
        "phases": account.phase_peaks(),
        "modules": [
            {
                "name": module.name,
                "own": module.exclusive,
                "inclusive": module.inclusive,
                "kinds": {kind.value: nbytes for kind, nbytes in module.own.items()},
            }
            for module in account.modules()
        ],
        "largest": [
            {
                "kind": tensor.kind.value,
                "module": tensor.module,
                "operation": tensor.operation,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "count": tensor.count,
                "bytes": tensor.nbytes,
            }
            for tensor in account.largest(LARGEST)
        ],
    }


def _flops(flops: Flops) -> dict[str, int]:
    return {"forward": flops.forward, "backward": flops.backward, "recomputed": flops.recomputed}


def _logits(logits: Logits | None) -> dict[str, Any] | None:
    if logits is None:
        return None
    return {
        "shape": list(logits.shape),
        "dtype": logits.dtype,
        "itemsize": logits.nbytes // max(1, math.prod(logits.shape)),
        "bytes": logits.nbytes,
        "copies": logits.copies,
        "live_at_most": logits.live,
        "formula": logits.formula,
    }
