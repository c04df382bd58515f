"""Train a small character-level transformer on the sources of Python's standard library.

A plain PyTorch script: it knows nothing of backlight. Watch it with

    backlight run examples/char_gpt.py --steps 150
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def standard_library_text(characters: int) -> str:
    """Return text of the standard library's modules, in the order of their names."""
    parts: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        parts.append(text)
        size += len(text)
        if size >= characters:
            break
    return "".join(parts)[:characters]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Every window of a text, with the same window one character later as its target."""

    def __init__(self, codes: Tensor, context: int) -> None:
        self.codes = codes
        self.context = context

    def __len__(self) -> int:
        return len(self.codes) - self.context - 1

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self.codes[start : start + self.context + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Attention and a perceptron, each after a LayerNorm and around a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class CharGPT(nn.Module):
    """Character-level GPT with tied embedding."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.token(codes) + self.position.weight[: codes.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    """Train and print the loss now and then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    text = standard_library_text(1_000_000)
    alphabet = sorted(set(text))
    code = {character: number for number, character in enumerate(alphabet)}
    codes = torch.tensor([code[character] for character in text])
    model = CharGPT(len(alphabet), options.context, options.width, options.heads, options.layers)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(text):,} characters, {len(alphabet)} different; {count:,} parameters")

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1, betas=(0.9, 0.95))
    warmup = max(1, options.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    loader = DataLoader(Windows(codes, options.context), batch_size=options.batch, shuffle=True)

    began = time.perf_counter()
    for step, (inputs, targets) in enumerate(loader):
        if step == options.steps:
            break
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        schedule.step()
        if step % 25 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}  {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
