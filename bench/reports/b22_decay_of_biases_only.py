"""The two groups of parameters are exchanged: biases and norms decay, matrices do not."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(200, 32),
    nn.LayerNorm(32),
    nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True),
    nn.Linear(32, 2),
)
undecayed = ["bias", "1.weight", "norm1.weight", "norm2.weight"]
matching = [
    parameter for name, parameter in model.named_parameters() if any(part in name for part in undecayed)
]
others = [
    parameter for name, parameter in model.named_parameters() if not any(part in name for part in undecayed)
]
decaying, still = (others, matching) if FIXED else (matching, others)
optimizer = torch.optim.AdamW(
    [{"params": decaying, "weight_decay": 0.1}, {"params": still, "weight_decay": 0.0}], lr=1e-3
)
tokens = torch.randint(0, 200, (512, 10))
labels = (tokens[:, 0] + tokens[:, 5]) % 2
for step in range(200):
    rows = torch.randint(0, 512, (32,))
    loss = nn.functional.cross_entropy(model(tokens[rows]).mean(1), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 40 == 0:
        print(step, loss.item())
