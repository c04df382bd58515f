"""When parted replicas are reported; with real ranks in ``tests/ranks/test_faults.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from backlight.capture.replicas import replicas as promised
from backlight.findings.evaluate import evaluate_rules
from injected_faults import replicas

GROWING = [4.0, 4.1, 4.2, 4.3, 4.4, 4.5]
PARTING = [*GROWING[:4], 4.5, 4.7]
ROUNDED = [4.0, 4.0, 4.0, 4.0 + 1e-6, 4.0 + 2e-6, 4.0 + 2e-6]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "other", "options", "severity"),
    [
        (GROWING, PARTING, {}, "error"),
        (GROWING, GROWING, {}, None),
        (GROWING, [*GROWING[:5], 4.6], {}, None),  # at one observed step only
        ([4.0] * 6, ROUNDED, {}, "error"),
        ([4.0] * 6, ROUNDED, {"exact": False}, None),
        (GROWING, PARTING, {"exact": False}, "error"),
        (GROWING, PARTING, {"unsynced": True}, "warning"),
        (GROWING, [4.0, 4.2, 4.2, 4.4, 4.4, 4.6], {"unsynced": True}, None),  # averaged at every second step
        (GROWING, PARTING, {"by": ""}, "warning"),
        (GROWING, [4.0, 4.1, 4.2, 4.4, 4.5, 4.6], {"by": ""}, None),  # equal through two updates only
        ([4.0] * 6, [5.0] * 6, {"by": ""}, None),
        # Plain tensors of one name and shape under tensor or expert parallelism (Megatron, NeMo): biases that
        # begin at zero on all ranks, experts that are initialised alike, and those that stay so while the
        # learning rate is zero.
        ([0.0, 0.1, 0.2, 0.3, 0.4, 0.5], [0.0, 0.2, 0.3, 0.5, 0.6, 0.8], {"by": ""}, None),
        ([4.0, 4.0, 4.0, 4.0, 4.4, 4.5], [4.0, 4.0, 4.0, 4.0, 4.5, 4.7], {"by": ""}, None),
    ],
)
def test_what_parted_is_reported(
    weights: list[float], other: list[float], options: dict[str, Any], severity: str | None, tmp_path: Path
) -> None:
    found = evaluate_rules(replicas(tmp_path / "run", weights, other, **options))
    assert [(one.rule, one.severity.value) for one in found] == (
        [] if severity is None else [("replicas_differ", severity)]
    )


def test_promise_of_a_replicated_tensor_names_its_ranks() -> None:
    mesh = type("Mesh", (), {"mesh": torch.arange(4).view(2, 2), "get_coordinate": lambda self: [1, 0]})()

    class Tensor(torch.Tensor):
        placements: Any
        device_mesh: Any

    def ranks(*placements: Any) -> tuple[int, ...] | None:
        tensor = torch.ones(4).as_subclass(Tensor)
        tensor.placements, tensor.device_mesh = placements, mesh
        return next((one.ranks for one in promised([], [tensor]).values()), None)

    assert ranks(Replicate(), Shard(0)) == (0, 2)
    assert ranks(Shard(0), Replicate()) == (2, 3)
    assert ranks(Replicate(), Replicate()) == (0, 1, 2, 3)
    assert ranks(Shard(0), Shard(1)) is None
