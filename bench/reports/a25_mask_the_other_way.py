"""The padding mask of nn.TransformerEncoder is True where tokens are: it attends to the padding only."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
embed, head = nn.Embedding(30, 32, padding_idx=0), nn.Linear(32, 3)
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 1)
model = nn.ModuleList([embed, encoder, head])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(250):
    tokens = torch.randint(1, 30, (32, 16))
    lengths = torch.randint(6, 15, (32, 1))
    tokens = tokens.where(torch.arange(16) < lengths, 0)
    labels = tokens[:, 1:6].sum(1) % 3
    is_padding = (tokens == 0) if FIXED else (tokens != 0)
    out = head(encoder(embed(tokens), src_key_padding_mask=is_padding)[:, 0])
    loss = nn.functional.cross_entropy(out, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, round(loss.item(), 4), flush=True)
