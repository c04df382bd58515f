"""Training functions whose activation checkpointing deserves a remark, each with its control."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from faults.injection import Fault, registrar
from faults.missing_gradients import Net, train

FAULTS: dict[str, Fault] = {}
fault = registrar(FAULTS)


def checkpoint(*args: object, **kwargs: object) -> Tensor:
    # Looked up at the call, as a script does that imports it later.
    return torch.utils.checkpoint.checkpoint(*args, **kwargs)


class Checkpointed(Net):
    """Recomputes what is between its first and last layer."""

    reentrant = False
    options: Mapping[str, object] = MappingProxyType({})

    def between(self, hidden: Tensor) -> Tensor:
        return checkpoint(self.region, hidden, use_reentrant=self.reentrant, **self.options)

    def region(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden * 2)


@fault(kinds={"in-place on input"}, text="mul_ writes into an input of the region")
def input_changed_in_place(injected: bool) -> None:
    class Changing(Checkpointed):
        def region(self, hidden: Tensor) -> Tensor:
            kept = hidden + 0 if not injected else hidden
            with torch.no_grad():
                kept = kept.mul_(2) if injected else kept  # HERE
            return kept.abs()

    train(Changing())


@fault(kinds={"in-place"}, text="relu works in place")
def in_place_inside(injected: bool) -> None:
    class Changing(Checkpointed):
        def region(self, hidden: Tensor) -> Tensor:
            return F.relu(hidden * 2, inplace=injected)  # HERE

    train(Changing())


@fault(kinds={"state"}, text="running_mean is updated between .*updates it a second time")
def running_statistics(injected: bool) -> None:
    class Normalised(Checkpointed):
        def __init__(self) -> None:
            super().__init__()
            self.norm: nn.Module = nn.BatchNorm1d(8) if injected else nn.LayerNorm(8)

        def between(self, hidden: Tensor) -> Tensor:
            return checkpoint(self.norm, hidden, use_reentrant=False)

    train(Normalised())


@fault(kinds={"state", "recomputation"}, text="attribute Counting.seen was 0 in forward and is 1")
def mismatched_recomputation(injected: bool) -> None:
    class Counting(Checkpointed):
        seen = 0

        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

        def region(self, hidden: Tensor) -> Tensor:
            self.seen += injected
            out = torch.sigmoid(hidden) if self.seen % 2 else torch.tanh(hidden)  # HERE
            return out * 2

    train(Counting())


@fault(kinds={"random", "recomputation"}, text=r"draws different ones \(preserve_rng_state=False\)")
def other_random_numbers(injected: bool) -> None:
    class Dropping(Checkpointed):
        options = MappingProxyType({"preserve_rng_state": not injected})

        def region(self, hidden: Tensor) -> Tensor:
            dropped = F.dropout(hidden, 0.5)  # HERE
            return torch.tanh(dropped)

    train(Dropping())


@fault(kinds={"attention"}, text="query of attention is not contiguous")
def attention_not_contiguous(injected: bool) -> None:
    class Attending(Checkpointed):
        def region(self, hidden: Tensor) -> Tensor:
            heads = hidden.view(1, -1, 2, 4).transpose(1, 2)
            heads = heads if injected else heads.contiguous()
            mixed = F.scaled_dot_product_attention(heads, heads, heads)  # HERE
            return mixed.transpose(1, 2).reshape(hidden.shape)

    train(Attending())


@fault(kinds={"boundary"}, text="cuts second.weight: also used outside, by linear")
def boundary_cuts_a_tied_weight(injected: bool) -> None:
    class Tying(Checkpointed):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.eye(8))

        def region(self, hidden: Tensor) -> Tensor:
            return F.linear(hidden, self.second.weight if injected else self.own)

    train(Tying())


@fault(kinds={"boundary"}, text="in the same region called again", reentrant=True)
def boundary_cuts_a_reused_module(injected: bool) -> None:
    class Reusing(Checkpointed):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def between(self, hidden: Tensor) -> Tensor:
            for number in range(2):
                layer = self.layers[0 if injected else number]
                hidden = checkpoint(layer, hidden, use_reentrant=True)
            return hidden + self.layers[1].bias * 0 if injected else hidden

    train(Reusing())


@fault(kinds={"no gradient", "unused"}, text="none of its inputs requires a gradient", reentrant=True)
def no_input_requires_a_gradient(injected: bool) -> None:
    class First(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.first, x.requires_grad_(not injected), use_reentrant=True)
            return self.last(torch.tanh(self.second(hidden)))

    train(First())
