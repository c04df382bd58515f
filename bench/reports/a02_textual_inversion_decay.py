"""Only a new token is to be learned: other rows get gradients of 0, and AdamW decays them all the same."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv
NEW = 999

torch.manual_seed(0)
embedding = nn.Embedding(1000, 32)
encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).requires_grad_(False)
head = nn.Linear(32, 16).requires_grad_(False)
pretrained = embedding.weight.detach().clone()
is_frozen = torch.arange(1000) != NEW
target = torch.randn(16)
optimizer = torch.optim.AdamW(embedding.parameters(), lr=5e-3, weight_decay=1e-2)
for step in range(300):
    tokens = torch.randint(0, 999, (16, 8))
    tokens[:, 3] = NEW
    loss = nn.functional.mse_loss(head(encoder(embedding(tokens)).mean(1)), target.expand(16, -1))
    optimizer.zero_grad()
    loss.backward()
    embedding.weight.grad[is_frozen] = 0
    optimizer.step()
    if FIXED:
        with torch.no_grad():
            embedding.weight[is_frozen] = pretrained[is_frozen]
    if step % 60 == 0:
        drift = (embedding.weight - pretrained)[is_frozen].norm() / pretrained[is_frozen].norm()
        print(step, round(loss.item(), 4), "drift of frozen rows", drift.item(), flush=True)
