"""What watching an engine of DeepSpeed adds to its steps, on two ranks over gloo.

Blocks of steps of one engine, interleaved: plain, watched with the default settings, plain once more (the
control). Figures are medians over the rounds of the ratio to the first of the round, of processor time of
rank 0 and of the clock. Each watched block is a run of its own, so that its first 64 steps are all recorded.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 bench/engines.py --stage 1
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from backlight.integrations.deepspeed import watch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    layers = [part for _ in range(8) for part in (nn.Linear(384, 384), nn.GELU())]
    model = nn.Sequential(*layers)
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    x = torch.randn(64, 384)

    def seconds() -> tuple[float, float]:
        begin = time.process_time(), time.perf_counter()
        for _ in range(options.steps):
            engine.backward(engine(x).square().mean())
            engine.step()
        return time.process_time() - begin[0], time.perf_counter() - begin[1]

    seconds()  # warm
    ratios: list[tuple[float, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            arms = []
            for arm in ("plain", "watched", "control"):
                name = [str(Path(folder) / f"run-{number}")]
                dist.broadcast_object_list(name)
                context: Any = contextlib.nullcontext()
                if arm == "watched":
                    context = watch(
                        engine, run=name[0], summary=False, quiet=True, resume=False, step_offset=0
                    )
                with context:
                    dist.barrier()
                    arms.append(seconds())
                dist.barrier()
            plain, watched, control = arms
            ratios.append(
                (watched[0] / plain[0], control[0] / plain[0], watched[1] / plain[1], control[1] / plain[1])
            )
        if not dist.get_rank():
            names = ("watched, processor", "control, processor", "watched, clock", "control, clock")
            for name, values in zip(names, zip(*ratios, strict=True), strict=True):
                low, middle, high = statistics.quantiles(values, n=4)
                print(f"stage {options.stage}: {name}: {middle:.3f} (quartiles {low:.3f} to {high:.3f})")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
