"""Low-rank adapters on a trained, frozen network. With `bug`, both factors are zero at the start."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

bug = "bug" in sys.argv
torch.manual_seed(0)


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.zeros(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        if not bug:
            nn.init.kaiming_uniform_(self.a, a=5**0.5)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


x = torch.randn(2048, 20)
old, new = x[:, :4].argmax(1), x[:, 4:8].argmax(1)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def train(labels, optimizer, epochs):
    for epoch in range(epochs):
        for index in torch.randperm(2048).split(64):
            loss = F.cross_entropy(model(x[index]), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(
            f"epoch {epoch} loss {loss.item():.4f} accuracy {(model(x).argmax(1) == labels).float().mean():.3f}"
        )


train(old, torch.optim.Adam(model.parameters(), lr=3e-3), 5)
for parameter in model.parameters():
    parameter.requires_grad = False
for i in (0, 2, 4):
    model[i] = LoRALinear(model[i])
trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
print(sum(parameter.numel() for parameter in trainable), "trainable parameters")
train(new, torch.optim.AdamW(trainable, lr=5e-3), 10)
torch.save(model.state_dict(), "lora.pt")
