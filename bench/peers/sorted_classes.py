"""The rows are sorted by class and the loader does not shuffle them."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(1024, 20)
y, order = (x @ torch.randn(20, 5)).argmax(1).sort()
x = x[order]
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loss_fn = nn.CrossEntropyLoss()
dataset = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(dataset, batch_size=32)  # BUG
# CONTROL: loader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)

# SETUP
for epoch in range(4):
    for inputs, targets in loader:
        # STEP
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        # STEPPED
    print(epoch, round(loss.item(), 4))
# END
