"""A worker of the loader waits for a lock that is never released."""

import multiprocessing

import torch
from torch import nn

torch.manual_seed(0)


class Locked(torch.utils.data.Dataset):
    """Samples of which one waits for ever."""

    def __init__(self):
        self.lock = multiprocessing.Lock()

    def __len__(self):
        return 640

    def __getitem__(self, index):
        """Return one sample."""
        if index == 400:  # BUG
            self.lock.acquire()  # BUG
        with self.lock:
            return x[index], y[index]


x = torch.randn(640, 20)
y = torch.randint(0, 5, (640,))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loss_fn = nn.CrossEntropyLoss()
loader = torch.utils.data.DataLoader(Locked(), batch_size=16, num_workers=1)

# SETUP
for inputs, targets in loader:
    # STEP
    optimizer.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    optimizer.step()
    # STEPPED
print(round(loss.item(), 4), flush=True)
# END
