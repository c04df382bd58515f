"""Fully connected nets: on images, on pairs of tokens, and with a power activation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "tanh": torch.tanh,
}


class Mlp(nn.Module):
    """Linear layers of ``sizes`` with an activation between, [N, sizes[0]] to [N, sizes[-1]].

    ``scale`` multiplies every initial weight and bias, which begin as ``nn.Linear`` draws them.
    """

    def __init__(self, sizes: Sequence[int], *, activation: str = "relu", scale: float = 1.0) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"model.activation is {activation!r}, expected one of {', '.join(sorted(ACTIVATIONS))}"
            )
        self.activation = ACTIVATIONS[activation]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(scale)

    def before_activations(self, x: Tensor) -> list[Tensor]:
        """Return the output of each linear layer, the last being the output of the net."""
        outputs: list[Tensor] = []
        for layer in self.layers:
            x = layer(x if not outputs else self.activation(outputs[-1]))
            outputs.append(x)
        return outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs [N, sizes[-1]]."""
        return self.before_activations(x)[-1]


class PairMlp(nn.Module):
    """Pairs of tokens [N, 2]: their embeddings added, a hidden ReLU layer, scores [N, p]."""

    def __init__(self, p: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(p, embedding)
        self.up = nn.Linear(embedding, hidden, bias=False)
        self.unembed = nn.Linear(hidden, p, bias=False)
        nn.init.normal_(self.embed.weight, std=embedding**-0.5)

    def forward(self, pairs_N2: Tensor) -> Tensor:
        """Return scores of the p results."""
        result: Tensor = self.unembed(torch.relu(self.up(self.embed(pairs_N2).sum(1))))
        return result


class FactoredPairMlp(nn.Module):
    """Pairs of tokens [N, 2] to scores [N, p], as the public code of 2310.19470 has it.

    The embeddings are added, a hidden ReLU layer follows, and its values go back to the width of the
    embedding before the scores are taken. No layer has a bias. Weights are normal: variance 1/p in the
    embedding, one over the number of inputs elsewhere.
    """

    def __init__(self, p: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(p, embedding)
        self.up = nn.Linear(embedding, hidden, bias=False)
        self.down = nn.Linear(hidden, embedding, bias=False)
        self.unembed = nn.Linear(embedding, p, bias=False)
        nn.init.normal_(self.embed.weight, std=p**-0.5)
        for layer in (self.up, self.down, self.unembed):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(self, pairs_N2: Tensor) -> Tensor:
        """Return scores of the p results."""
        hidden_NH = torch.relu(self.up(self.embed(pairs_N2).sum(1)))
        result: Tensor = self.unembed(self.down(hidden_NH))
        return result


class PowerNet(nn.Module):
    """``unembed((embed(x))^power)`` without bias, [N, inputs] → [N, width] → [N, outputs].

    Weights start normal with a variance of one over the number of inputs of their layer. With the square and
    one-hot pairs, Gromov (2301.02679) writes a solution of modular addition in closed form; Doshi et al.
    (2406.03495) take higher powers.
    """

    def __init__(self, inputs: int, width: int, outputs: int, *, power: int) -> None:
        super().__init__()
        self.power = power
        self.embed = nn.Linear(inputs, width, bias=False)
        self.unembed = nn.Linear(width, outputs, bias=False)
        nn.init.normal_(self.embed.weight, std=inputs**-0.5)
        nn.init.normal_(self.unembed.weight, std=width**-0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs [N, outputs]."""
        hidden: Tensor = self.embed(inputs)
        return self.unembed(torch.pow(hidden, self.power))  # type: ignore[no-any-return]  # nn.Module returns Any


class AdditionToy(nn.Module):
    """Pairs [N, 2] of p numbers → E_a + E_b → a tanh net → [N, outputs].

    Embeddings [p, dimensions] begin uniform in (-1/2, 1/2).
    """

    def __init__(self, p: int, dimensions: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(p, dimensions)
        nn.init.uniform_(self.embed.weight, -0.5, 0.5)
        self.decoder = Mlp((dimensions, hidden, hidden, outputs), activation="tanh")

    def forward(self, pairs_N2: Tensor) -> Tensor:
        """Return the decoded vectors."""
        result: Tensor = self.decoder(torch.sum(self.embed(pairs_N2), 1))
        return result
