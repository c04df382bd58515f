"""A model is moved by ``to_empty`` and loaded: buffers that no checkpoint holds stay garbage."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv


class Net(nn.Module):
    """A language model with rotary positions, whose frequencies no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, 50)
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(16) / 16), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.embed(tokens))
        angle = torch.arange(tokens.shape[1])[:, None] * self.frequencies
        a, b = x.chunk(2, -1)
        x = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
        scores = (x @ x.mT / 32**0.5).masked_fill(~torch.ones(x.shape[1], x.shape[1]).tril().bool(), -1e9)
        return self.head(scores.softmax(-1) @ x)


torch.manual_seed(0)
checkpoint = Net().state_dict()
with torch.device("meta"):
    model = Net()
model.to_empty(device="cpu")
model.load_state_dict(checkpoint)
if FIXED:
    model.frequencies.copy_(1.0 / 10000 ** (torch.arange(16) / 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(150):
    tokens = (torch.randint(0, 50, (16, 1)) + torch.arange(17)) % 50
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(step, loss.item(), flush=True)
print("frequencies", model.frequencies[:6].tolist())
