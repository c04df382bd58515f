"""Train the demo model on two ranks and ask which directions of its gradients are signal.

    torchrun --nproc-per-node 2 examples/spectra_ddp.py --out runs/spectra
    backlight report runs/spectra

Every rank takes several microbatches before a step. Each of them is one replicate of the gradient, caught
before the ranks are averaged: nothing is computed twice, and the training takes the steps that it would have
taken.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from char_gpt import CharGPT, standard_library_text
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import backlight


def windows(codes: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a batch of windows and their targets."""
    starts = torch.randint(len(codes) - context - 1, (batch,), generator=generator).tolist()
    drawn = torch.stack([codes[start : start + context + 1] for start in starts])
    return drawn[:, :-1], drawn[:, 1:]


def main() -> None:
    """Train, watched; rank 0 says where the run is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=41)
    parser.add_argument("--every", type=int, default=10, help="steps between two measurements")
    parser.add_argument("--microbatches", type=int, default=8, help="of a rank, for each step")
    parser.add_argument("--batch", type=int, default=4, help="samples of a microbatch")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path("runs/spectra"))
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    text = standard_library_text(300_000)
    alphabet = sorted(set(text))
    code = {character: number for number, character in enumerate(alphabet)}
    codes = torch.tensor([code[character] for character in text])
    # Every rank draws from its own part of the text: replicates with the same data would always agree.
    share = len(codes) // dist.get_world_size()
    mine = codes[dist.get_rank() * share : (dist.get_rank() + 1) * share]
    generator = torch.Generator().manual_seed(dist.get_rank())

    net = CharGPT(len(alphabet), options.context, options.width, 4, options.layers)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    # The fused attention weight is three matrices, and the microbatches of both ranks are replicates.
    spectra = {"fused": {"*.qkv.weight": ("q", "k", "v")}, "exchange": True}
    with backlight.watch(
        model, optimizer, run=options.out, monitors=("spectra",), every=options.every, spectra=spectra
    ):
        for _ in range(options.steps):
            optimizer.zero_grad()
            for last in [False] * (options.microbatches - 1) + [True]:
                inputs, targets = windows(mine, options.batch, options.context, generator)
                model.require_backward_grad_sync = last  # the ranks are averaged once
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                (loss / options.microbatches).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}; backlight report {options.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
