"""A decoder's loss does not shift the labels, and neither does the data set: it learns to copy its input."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
embed, head = nn.Embedding(50, 32), nn.Linear(32, 50)
layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
model = nn.ModuleList([embed, layer, head])
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
mask = nn.Transformer.generate_square_subsequent_mask(20)
for step in range(200):
    tokens = (torch.randint(0, 50, (32, 1)) + torch.arange(20) * torch.randint(1, 4, (32, 1))) % 50
    scores = head(layer(embed(tokens), src_mask=mask, is_causal=True))
    labels = tokens
    if FIXED:
        scores, labels = scores[:, :-1], labels[:, 1:]
    loss = nn.functional.cross_entropy(scores.reshape(-1, 50), labels.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(step, round(loss.item(), 4), flush=True)
