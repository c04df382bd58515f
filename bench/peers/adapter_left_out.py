"""The optimizer is built before the adapter is added; only the adapter can be trained."""

import torch
from torch import nn

torch.manual_seed(0)


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter of low rank."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        """Return the output of the layer and of its adapter."""
        return self.base(x) + self.lora_B(self.lora_A(x))


x = torch.randn(512, 20)
y = (x @ torch.randn(20, 5)).argmax(1)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)  # BUG
model[0] = LoraLinear(model[0])
model[2] = LoraLinear(model[2])
# CONTROL: optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
loss_fn = nn.CrossEntropyLoss()

# SETUP
for step in range(80):
    rows = torch.randint(0, len(x), (32,))
    inputs, targets = x[rows], y[rows]
    # STEP
    optimizer.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    optimizer.step()
    # STEPPED
    if step % 20 == 0:
        print(step, round(loss.item(), 4))
# END
