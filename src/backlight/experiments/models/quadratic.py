"""A two-layer net with a power activation, without bias: f(x) = act(x Eᵀ) Wᵀ.

With the square and one-hot pairs it is the net for which Gromov (2301.02679) writes a solution of
modular addition in closed form; Doshi et al. (2406.03495) take higher powers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PowerNet(nn.Module):
    """``unembed((embed(x))ᵏ)``, shapes [N, inputs] → [N, width] → [N, outputs].

    Parameters
    ----------
    power:
        The exponent k of the activation, 2 for the quadratic net.
    embed_std, unembed_std:
        Standard deviations of the normal initial weights.
    """

    def __init__(
        self, inputs: int, width: int, outputs: int, *, power: int, embed_std: float, unembed_std: float
    ) -> None:
        super().__init__()
        self.power = power
        self.embed = nn.Linear(inputs, width, bias=False)
        self.unembed = nn.Linear(width, outputs, bias=False)
        nn.init.normal_(self.embed.weight, std=embed_std)
        nn.init.normal_(self.unembed.weight, std=unembed_std)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs [N, outputs]."""
        hidden: Tensor = self.embed(inputs)
        return self.unembed(torch.pow(hidden, self.power))  # type: ignore[no-any-return]  # nn.Module returns Any
