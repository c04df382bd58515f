"""GAN on points of a ring. With `bug`, the fakes of the generator's step are detached as well."""

import math
import sys

import torch
import torch.nn as nn

bug = "bug" in sys.argv
torch.manual_seed(0)
generator = nn.Sequential(
    nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2)
)
discriminator = nn.Sequential(
    nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
)
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)

for step in range(300):
    angle = 2 * math.pi * torch.rand(64)
    real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2)
    fake = generator(torch.randn(64, 4))

    opt_d.zero_grad()
    loss_d = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
    loss_d.backward()
    opt_d.step()

    opt_g.zero_grad()
    if bug:
        fake = fake.detach()
    loss_g = criterion(discriminator(fake), ones)
    loss_g.backward()
    opt_g.step()
    if step % 50 == 0:
        print(f"step {step} D {loss_d.item():.4f} G {loss_g.item():.4f}")
torch.save({"g": generator.state_dict(), "d": discriminator.state_dict()}, "gan.pt")
