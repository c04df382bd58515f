"""The nets of the experiments: fully connected ones, and the transformers of three papers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from backlight.experiments.data.algorithmic import NO_TOKEN

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
    """Pairs of tokens [N, 2]: their embeddings added, a hidden ReLU layer, scores [N, p].

    ``factored`` is the net of the public code of 2310.19470: the hidden values go back to the width of the
    embedding before the scores are taken, and weights are normal, with variance 1/p in the embedding and one
    over the number of inputs elsewhere.
    """

    def __init__(self, p: int, embedding: int, hidden: int, *, factored: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(p, embedding)
        self.up = nn.Linear(embedding, hidden, bias=False)
        self.down = nn.Linear(hidden, embedding, bias=False) if factored else nn.Identity()
        self.unembed = nn.Linear(embedding if factored else hidden, p, bias=False)
        nn.init.normal_(self.embed.weight, std=(p if factored else embedding) ** -0.5)
        if factored:
            for layer in (self.up, self.down, self.unembed):
                for weight in layer.parameters():
                    nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, pairs_N2: Tensor) -> Tensor:
        """Return scores of the p results."""
        result: Tensor = self.unembed(self.down(torch.relu(self.up(self.embed(pairs_N2).sum(1)))))
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


def at_positions(x_NTD: Tensor, positions_N: Tensor) -> Tensor:
    """Return one position of each sample, [N, 1, width]."""
    return x_NTD[torch.arange(len(x_NTD), device=x_NTD.device), positions_N][:, None]


class CausalAttention(nn.Module):
    """Multi-head attention, each position over itself and those before; [N, T, width] to the same.

    With positions_N only one position of each sample is computed, [N, 1, width]: all that the last block
    needs when the answer is read there, for a fraction of the time. Projections are linear layers, so that
    every parameter has per-sample gradients by a kernel.
    """

    def __init__(self, width: int, heads: int, *, bias: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not divide a width of {width}; change model.heads")
        self.heads = heads
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x_NTD: Tensor, positions_N: Tensor | None = None) -> Tensor:
        """Return the attended values."""
        n, t, d = x_NTD.shape
        asked_NQD = x_NTD if positions_N is None else at_positions(x_NTD, positions_N)
        query, key, value = (
            layer(x).view(n, -1, self.heads, d // self.heads).transpose(1, 2)
            for layer, x in ((self.query, asked_NQD), (self.key, x_NTD), (self.value, x_NTD))
        )
        if positions_N is None:
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            # One query over a few positions: products and sums are faster than the kernel for attention.
            scores_NHT = (query * key).sum(-1) * (d // self.heads) ** -0.5
            later_NT = torch.arange(t, device=x_NTD.device) > positions_N[:, None]
            weights_NHT = scores_NHT.masked_fill(later_NT[:, None], -torch.inf).softmax(-1)
            mixed = (weights_NHT[..., None] * value).sum(2, keepdim=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(n, -1, d))
        return result


def sinusoids(length: int, width: int) -> Tensor:
    """Return positions [length, width]: sines in the even columns, cosines in the odd (1706.03762)."""
    rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :width]


class DecoderBlock(nn.Module):
    """Attention and a ReLU layer of four widths, each followed by the sum and a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = CausalAttention(width, heads, bias=False)
        self.attention_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width)

    def forward(self, x_NTD: Tensor, positions_N: Tensor | None = None) -> Tensor:
        """Return the next residual stream, [N, T, width]; [N, 1, width] with one position of each sample."""
        attended = self.attention(x_NTD, positions_N)
        x_NTD = self.attention_norm(
            (x_NTD if positions_N is None else at_positions(x_NTD, positions_N)) + attended
        )
        result: Tensor = self.feed_forward_norm(x_NTD + self.down(torch.relu(self.up(x_NTD))))
        return result


class Decoder(nn.Module):
    """Tokens [N, T] to scores of the token that comes next, [N, vocabulary]."""

    positions: Tensor

    def __init__(self, vocabulary: int, length: int, *, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.register_buffer("positions", sinusoids(length, width), persistent=False)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens_NT: Tensor) -> Tensor:
        """Return the scores at the last position."""
        n, t = tokens_NT.shape
        x_NTD = self.embed(tokens_NT) + self.positions[:t]
        for block in list(self.blocks)[:-1]:
            x_NTD = block(x_NTD)
        # The answer is read at the last position, so the last block computes no other.
        x_N1D = self.blocks[-1](x_NTD, torch.full((n,), t - 1, device=tokens_NT.device))
        result: Tensor = self.head(x_N1D[:, 0])
        return result


class GptBlock(nn.Module):
    """LayerNorm and attention, LayerNorm and a GELU layer of four widths, both added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, bias=True)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_NTD: Tensor, positions_N: Tensor | None = None) -> Tensor:
        """Return the next residual stream, [N, T, width]; [N, 1, width] with one position of each sample."""
        attended = self.attention(self.attention_norm(x_NTD), positions_N)
        x_NTD = (x_NTD if positions_N is None else at_positions(x_NTD, positions_N)) + attended
        hidden = nn.functional.gelu(self.up(self.feed_forward_norm(x_NTD)), approximate="tanh")
        result: Tensor = x_NTD + self.down(hidden)
        return result


class Gpt(nn.Module):
    """Questions [N, T] to scores of the answer, [N, vocabulary].

    A question may end early with ``NO_TOKEN``; the answer is read at its last real token, which sees
    none of those after it.
    """

    def __init__(self, vocabulary: int, length: int, *, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GptBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        self.head.weight = self.embed.weight

    def forward(self, tokens_NT: Tensor) -> Tensor:
        """Return the scores of the answer."""
        positions_NT = torch.arange(tokens_NT.shape[1], device=tokens_NT.device).expand_as(tokens_NT)
        x_NTD = self.embed(tokens_NT.clamp(min=0)) + self.positions(positions_NT)
        for block in list(self.blocks)[:-1]:
            x_NTD = block(x_NTD)
        # The answer is read at one position, so the last block computes no other.
        x_N1D = self.norm(self.blocks[-1](x_NTD, (tokens_NT != NO_TOKEN).sum(1) - 1))
        result: Tensor = self.head(x_N1D[:, 0])
        return result


class PlainTransformer(nn.Module):
    """Tokens [N, length] to scores at the last position, [N, vocabulary].

    Weights are normal with standard deviation 1/√width (the unembedding 1/√vocabulary), biases of the
    ReLU layer 0; attention and unembedding have none.
    """

    def __init__(
        self, vocabulary: int, length: int, *, layers: int, width: int, heads: int, hidden: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.attentions = nn.ModuleList(CausalAttention(width, heads, bias=False) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(width, hidden) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(hidden, width) for _ in range(layers))
        self.unembed = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=width**-0.5)
        nn.init.normal_(self.unembed.weight, std=vocabulary**-0.5)

    def forward(self, tokens_NT: Tensor) -> Tensor:
        """Return the scores of the answer."""
        positions_NT = torch.arange(tokens_NT.shape[1], device=tokens_NT.device).expand_as(tokens_NT)
        x_NTD = self.embed(tokens_NT) + self.positions(positions_NT)
        for attention, up, down in zip(self.attentions, self.ups, self.downs, strict=True):
            x_NTD = x_NTD + attention(x_NTD)
            x_NTD = x_NTD + down(torch.relu(up(x_NTD)))
        result: Tensor = self.unembed(x_NTD[:, -1])
        return result
