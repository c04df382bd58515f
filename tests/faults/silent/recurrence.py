"""Recurrent layers whose state is detached in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.silent.loop import control, fault, train

LENGTH, SAMPLES, WIDTH = 6, 8, 5


def series(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    return ((torch.randn(LENGTH, SAMPLES, 4), torch.randint(0, 3, (SAMPLES,))) for _ in range(count))


Cut = Callable[[Tensor, int], Tensor]


class Unrolled(nn.Module):
    """Calls a cell per time step; ``cut`` is applied to the state in front of each call."""

    def __init__(self, cell: nn.Module, cut: Cut) -> None:
        super().__init__()
        self.cell, self.head, self.cut = cell, nn.Linear(WIDTH, 3), cut

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[1], WIDTH)
        for number, part in enumerate(x):
            state = self.cell(part, self.cut(state, number))
        return self.head(state)


@fault(rule="loss_input", severity="warning", step=0, kind="state_without_graph", names="`cell` (GRUCell)")
def state_detached_at_each_step(injected: bool) -> None:
    def cut(state: Tensor, number: int) -> Tensor:
        return state.detach() if injected else state

    train(Unrolled(nn.GRUCell(4, WIDTH), cut), data=series, is_compiled=False)


@fault(rule="loss_input", severity="warning", step=0, kind="state_without_graph", names="called 6 times")
def state_copied_at_each_step(injected: bool) -> None:
    """The values of the state go on in another tensor. The control detaches in the middle."""

    def cut(state: Tensor, number: int) -> Tensor:
        return state.detach().clone() if injected or number == 3 else state

    train(Unrolled(nn.RNNCell(4, WIDTH), cut), data=series, is_compiled=False)


class Streamed(nn.Module):
    """Gives an LSTM one time step at a time, and keeps both of its states as an attribute."""

    def __init__(self, *, detaches: bool) -> None:
        super().__init__()
        self.lstm, self.head, self.detaches = nn.LSTM(4, WIDTH), nn.Linear(WIDTH, 3), detaches

    def forward(self, x: Tensor) -> Tensor:
        self.state: tuple[Tensor, ...] | None = None
        for part in x:
            out, state = self.lstm(part[None], self.state)
            self.state = tuple(one.data for one in state) if self.detaches else state
        return self.head(out[0])


@fault(rule="loss_input", severity="warning", step=0, kind="state_without_graph", names="`lstm` (LSTM)")
def states_of_an_lstm_by_data(injected: bool) -> None:
    train(Streamed(detaches=injected), data=series, is_compiled=False)


@control
def truncated_backpropagation() -> None:
    """The state of the last window is detached once, in front of the next one."""
    layer, head = nn.GRU(4, WIDTH), nn.Linear(WIDTH, 3)
    states: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        out, state = layer(x, states.pop() if states else None)
        states.append(state.detach())
        return head(out[-1])

    train(model, parts=[layer, head], data=series, is_compiled=False)


@control
def one_cell_for_independent_series() -> None:
    """Each call of the layer begins with zeros."""
    layer, head = nn.GRU(4, WIDTH), nn.Linear(WIDTH, 3)

    def model(x: Tensor) -> Tensor:
        parts = [layer(x + shift, torch.zeros(1, SAMPLES, WIDTH))[0][-1] for shift in range(4)]
        return head(torch.stack(parts).mean(0))

    train(model, parts=[layer, head], data=series, is_compiled=False)


@control
def losses_of_single_steps() -> None:
    """A loss, with its backward, for every time step: there is one call in each."""
    cell, head = nn.GRUCell(4, WIDTH), nn.Linear(WIDTH, 3)
    states: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        states.append(cell(x[0], states.pop().detach() if states else None))
        return head(states[-1])

    train(model, parts=[cell, head], data=series, is_compiled=False)


@control
def states_of_a_rollout_without_gradients() -> None:
    """A recurrent policy acts without gradients, and is then trained through time."""
    cell, head = nn.GRUCell(4, WIDTH), nn.Linear(WIDTH, 3)

    def model(x: Tensor) -> Tensor:
        with torch.no_grad():
            state = torch.zeros(SAMPLES, WIDTH)
            for part in x:
                state = cell(part, state)
        for part in x:
            state = cell(part, state)
        return head(state)

    train(model, parts=[cell, head], data=series, loss_of=F.cross_entropy, is_compiled=False)


def stacked(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    return ((torch.randn(SAMPLES, LENGTH, 4), torch.randint(0, 3, (SAMPLES,))) for _ in range(count))


class LastOutput(nn.Module):
    """Classifies ``[N, T, 4]`` by the last output of a recurrent layer."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(4, WIDTH, batch_first=batch_first), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


@fault(rule="loss_input", severity="warning", step=0, kind="samples_as_time", names="`layer` (GRU)")
def recurrent_layer_that_takes_samples_as_time(injected: bool) -> None:
    train(LastOutput(batch_first=not injected), data=stacked, is_compiled=False)


@fault(rule="loss_input", severity="warning", step=0, kind="samples_as_time", names="[8, 6, 4]")
def attention_that_takes_samples_as_time(injected: bool) -> None:
    encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=not injected)
    head = nn.Linear(4, 1)

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y[:, None].float())

    train(
        lambda x: head(encoder(x).mean(1)),
        parts=[encoder, head],
        data=stacked,
        loss_of=loss_of,
        is_compiled=False,
    )


@control
def tags_of_one_sentence() -> None:
    """``[T, 1, C]``: a row of the loss for each word, and one sample."""
    layer, head = nn.LSTM(4, WIDTH), nn.Linear(WIDTH, 3)
    train(
        lambda x: head(layer(x[:, None])[0][:, 0]),
        parts=[layer, head],
        data=lambda count: ((torch.randn(9, 4), torch.randint(0, 3, (9,))) for _ in range(count)),
        is_compiled=False,
    )


@control
def forecast_of_each_time_step() -> None:
    """Time first on purpose, with a target for each position of each sample."""
    layer, head = nn.GRU(4, WIDTH), nn.Linear(WIDTH, 1)
    train(
        lambda x: head(layer(x)[0])[..., 0],
        parts=[layer, head],
        data=lambda count: ((x, x.sum(-1)) for x, _ in series(count)),
        loss_of=F.mse_loss,
        is_compiled=False,
    )


@control
def classes_of_series_with_time_first() -> None:
    """The loss has a row for each entry of axis 1."""
    layer, head = nn.GRU(4, WIDTH), nn.Linear(WIDTH, 3)
    train(lambda x: head(layer(x)[0][-1]), parts=[layer, head], data=series, is_compiled=False)
