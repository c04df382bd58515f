"""Every sample waits for its file: the loop waits for data."""

import time

import torch
from torch import nn

torch.manual_seed(0)


class Slow(torch.utils.data.Dataset):
    """Samples that take a while to read."""

    def __len__(self):
        return 320

    def __getitem__(self, index):
        """Return one sample."""
        time.sleep(0.004)  # BUG
        return x[index], y[index]


x = torch.randn(320, 256)
y = torch.randint(0, 5, (320,))
model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loss_fn = nn.CrossEntropyLoss()
loader = torch.utils.data.DataLoader(Slow(), batch_size=16, shuffle=True)

# SETUP
for epoch in range(5):
    for inputs, targets in loader:
        # STEP
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        # STEPPED
    print(epoch, round(loss.item(), 4))
# END
