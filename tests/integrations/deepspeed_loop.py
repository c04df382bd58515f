"""A model under DDP and under engines of DeepSpeed on two ranks over gloo; run by torchrun from the tests.

torchrun --nproc-per-node 2 deepspeed_loop.py FOLDER NAME...

A name is ``ddp``, or ``zero0`` to ``zero3`` and what differs: ``fp16``, ``bf16``, ``offload``, ``overflow``,
``nvme``, ``spectra``, a fault (``cut``, ``drift``) or its length (``long``), ``module`` or ``optimizer`` for
what is watched, ``plain`` for no watch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

import backlight
from backlight.integrations.deepspeed import watch
from backlight.session.settings import DEFAULT_MONITORS

STEPS, FAULT_STEPS, MICROBATCHES, LIMIT = 6, 24, 2, 0.5

torch.set_num_threads(1)


class Net(nn.Module):
    """Matrices that no rank boundary meets between two rows, a norm, and a frozen layer."""

    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 33), nn.LayerNorm(33), nn.Linear(33, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.is_cut = is_cut

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.relu(self.up(x)))
        return self.frozen(self.down(hidden.detach() if self.is_cut else hidden))


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return the microbatches of this rank."""
    drawn = torch.Generator().manual_seed(dist.get_rank() + 1)
    count = steps * MICROBATCHES
    return [
        (torch.randn(4, 16, generator=drawn), torch.randint(0, 4, (4,), generator=drawn))
        for _ in range(count)
    ]


def built(words: set[str]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, and its optimizer with two groups."""
    torch.manual_seed(0)
    model = Net(is_cut="cut" in words)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0, "lr": 2e-2},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def train_plainly(out: Path) -> dict[str, Any]:
    """Train under DDP."""
    model, optimizer = built(set())
    wrapped = nn.parallel.DistributedDataParallel(model)
    with backlight.watch(wrapped, optimizer, run=out, every=1, summary=False):
        for number, (x, y) in enumerate(batches(STEPS), start=1):
            with wrapped.no_sync() if number % MICROBATCHES else contextlib.nullcontext():
                (nn.functional.cross_entropy(wrapped(x), y) / MICROBATCHES).backward()
            if not number % MICROBATCHES:
                nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
                optimizer.step()
                optimizer.zero_grad()
    return {}


def train(out: Path, stage: int, words: set[str]) -> dict[str, Any]:
    """Train under an engine."""
    model, optimizer = built(words)
    zero: dict[str, Any] = {"stage": stage}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": LIMIT,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if words & {"fp16", "overflow"}:
        get_accelerator().is_fp16_supported = lambda: True  # slow on this CPU, and right
        power = 28 if "overflow" in words else 8
        config["fp16"] = {"enabled": True, "initial_scale_power": power, "hysteresis": 1}
    if "bf16" in words:
        config["bf16"] = {"enabled": True}
    if "offload" in words:
        zero["offload_optimizer"] = {"device": "cpu"}
    engine, outer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if "nvme" in words:
        outer.swap_optimizer = True
    context: Any = contextlib.nullcontext()
    if "module" in words:
        context = backlight.watch(engine.module, run=out, every=1, summary=False)
    elif "optimizer" in words:
        context = backlight.watch(engine.module, outer, run=out, every=1, summary=False)
    elif "plain" not in words:
        monitors = (*DEFAULT_MONITORS, *(words & {"spectra"}))
        context = watch(engine, run=out, every=1, summary=False, monitors=monitors)
    skipped = []
    with context:
        if "nvme" in words:
            outer.swap_optimizer = False
        for number, (x, y) in enumerate(batches(FAULT_STEPS if words & {"cut", "long"} else STEPS)):
            logits = engine(x.to(next(engine.module.parameters()).dtype))
            engine.backward(nn.functional.cross_entropy(logits.float(), y))
            engine.step()
            if number % MICROBATCHES:
                skipped.append(not engine.was_step_applied())
            if "drift" in words and number == MICROBATCHES and dist.get_rank():
                with torch.no_grad():
                    model.down.weight.add_(1e-3)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = safe_get_full_fp32_param(parameter) if parameter.requires_grad and stage else parameter
        digest.update(whole.detach().cpu().float().numpy().tobytes())
    return {"digest": digest.hexdigest(), "random": torch.get_rng_state().sum().item(), "skipped": skipped}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    deepspeed.init_distributed("gloo", verbose=False)
    results = {}
    for name in sys.argv[2:]:
        kind, *words = name.split("-")
        run = folder / name
        results[name] = train_plainly(run) if kind == "ddp" else train(run, int(kind[-1]), set(words))
        dist.barrier()
    (folder / f"results-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
