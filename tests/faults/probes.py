"""Errors that a probe of the first step shows, each with its control; run under ``backlight check``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from faults.injection import Fault, registrar

FAULTS: dict[str, Fault] = {}
fault = registrar(FAULTS)

TOKENS, LENGTH, WIDTH, BATCH = 16, 12, 16, 8


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x))[:, None].chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)[:, 0])
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


class Transformer(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block, self.head = Block(causal), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(tokens) + self.positions.weight))


class Recurrent(nn.Module):
    """Reads ``[T, B]`` tokens; ``detached`` cuts the state at each step."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.detached = detached
        self.tokens, self.cell, self.head = (
            nn.Embedding(TOKENS, WIDTH),
            nn.GRUCell(WIDTH, WIDTH),
            nn.Linear(WIDTH, TOKENS),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        state, out = torch.zeros(tokens.shape[1], WIDTH), []
        for x in self.tokens(tokens):
            state = self.cell(x, state.detach() if self.detached else state)
            out.append(self.head(state))
        return torch.stack(out)


class Series(nn.Module):
    """An LSTM over a series of vectors."""

    def __init__(self, *, bidirectional: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, WIDTH, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(WIDTH * (1 + bidirectional), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def language(distance: int = 1) -> tuple[Tensor, Tensor]:
    """Return tokens ``[B, T]``, and those ``distance`` positions on."""
    start = torch.randint(0, TOKENS, (BATCH, 1))
    steps = torch.randint(1, 4, (BATCH, LENGTH + 2)).cumsum(1)
    text = (start + steps) % TOKENS
    return text[:, :LENGTH], text[:, distance : LENGTH + distance]


def fit(model: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]]) -> nn.Module:
    """Train a classifier of all positions for three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    return model


@fault(probe="future", text=r"up to position 0 depends on the input at 1 to 11")
def attention_without_mask(injected: bool) -> None:
    fit(Transformer(causal=not injected), language)


@fault(probe="targets", text=r"100% of the targets are the input at their own position")
def targets_are_not_shifted(injected: bool) -> None:
    fit(Transformer(causal=True), lambda: language(0 if injected else 1))


@fault(probe="targets", text=r"the input 2 positions on, not the next one")
def targets_are_shifted_twice(injected: bool) -> None:
    fit(Transformer(causal=True), lambda: language(2 if injected else 1))


@fault(probe="through-time", text=r"its gradient reaches no earlier position")
def state_is_detached(injected: bool) -> None:
    def sequence_first() -> tuple[Tensor, Tensor]:
        tokens, targets = language()
        return tokens.T, targets.T

    fit(Recurrent(detached=injected), sequence_first)


@fault(probe="future", text=r"depends on the input at 1 to 11")
def forecast_reads_both_ways(injected: bool) -> None:
    def series() -> tuple[Tensor, Tensor]:
        x = torch.randn(BATCH, LENGTH, 3)
        return x, x.cumsum(1).argmax(-1)

    fit(Series(bidirectional=injected), series)


def images() -> tuple[Tensor, Tensor]:
    labels = torch.arange(32) % 4
    return torch.eye(4)[labels].repeat(1, 4) + 0.3 * torch.randn(32, 16), labels


@fault(probe="overfit", text=r"begins at 1\.39 and does not fall below 1\.39")
def head_is_dead(injected: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    if injected:
        nn.init.zeros_(model[2].weight)
        nn.init.constant_(model[2].bias, -1.0)
        model.append(nn.ReLU())
    fit(model, images)


@fault(probe="labels", outcome="undecided", text=r"unrelated to the inputs")
def labels_are_shuffled(injected: bool) -> None:
    def batch() -> tuple[Tensor, Tensor]:
        x, labels = images()
        return x, labels[torch.randperm(32)] if injected else labels

    fit(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), batch)


class Checkpointed(nn.Module):
    def __init__(self, *, preserves: bool) -> None:
        super().__init__()
        self.preserves = preserves
        self.inside = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        run = torch.utils.checkpoint.checkpoint
        hidden = run(self.inside, x, use_reentrant=False, preserve_rng_state=self.preserves)
        return self.head(hidden)


@fault(probe="recomputation", text=r"the recomputation draws different ones")
def recomputed_with_another_dropout(injected: bool) -> None:
    fit(Checkpointed(preserves=not injected), images)


class LastState(nn.Module):
    """Classifies series ``[B, T, 3]`` by the last output of a recurrent layer, or of attention."""

    def __init__(self, *, batch_first: bool, attends: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=batch_first)
        recurrent = nn.GRU(WIDTH, WIDTH, batch_first=batch_first)
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 4)
        self.layer: nn.Module = layer if attends else recurrent

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(self.embed(x))
        return self.head((out[0] if isinstance(out, tuple) else out)[:, -1])


def series() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, LENGTH, 3), torch.randint(0, 4, (BATCH,))


@fault(probe="samples", text=r"of 8 samples \(axis 0 .*mixed by `gru` in `layer` \(GRU\), .*probes\.py:\d+")
def recurrent_layer_takes_time_first(injected: bool) -> None:
    fit(LastState(batch_first=not injected), series)


@fault(probe="samples", text=r"mixed by `multi_head_attention_forward` in `layer.self_attn`")
def attention_takes_time_first(injected: bool) -> None:
    fit(LastState(batch_first=not injected, attends=True), series)


class Viewed(nn.Module):
    """Takes a convolution's ``[B, C, T]`` to a recurrent layer that takes time first."""

    def __init__(self, *, by_view: bool) -> None:
        super().__init__()
        self.by_view = by_view
        self.embed, self.layer = nn.Conv1d(3, WIDTH, 3, padding=1), nn.GRU(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.embed(x.movedim(1, 2))
        out = out.view(LENGTH, BATCH, WIDTH) if self.by_view else out.permute(2, 0, 1)
        return self.head(self.layer(out)[0][-1])


@fault(probe="samples", text=r"mixed by `view` in `Viewed` \(Viewed\), .*probes\.py:\d+")
def batch_is_viewed_as_time(injected: bool) -> None:
    fit(Viewed(by_view=injected), series)


class Gated(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.head, self.dim = nn.Linear(16, 16), nn.Linear(16, 4), dim

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gate(x).softmax(self.dim) * x)


@fault(probe="samples", text=r"of 32 samples .*mixed by `softmax` in `Gated`")
def softmax_over_the_batch(injected: bool) -> None:
    fit(Gated(0 if injected else 1), images)


class Conditioned(nn.Module):
    """Reads an image and a condition, which ``ignores`` leaves out."""

    def __init__(self, *, ignores: bool) -> None:
        super().__init__()
        self.ignores = ignores
        self.image, self.condition, self.head = nn.Linear(16, 8), nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        hidden = self.image(x) + self.condition(condition) * (0 if self.ignores else 1)
        return self.head(hidden.relu())


@fault(probe="inputs", text=r"the same with other values of `condition` of Conditioned$")
def condition_is_ignored(injected: bool) -> None:
    model = Conditioned(ignores=injected)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = images()
    F.cross_entropy(model(x, torch.randn(32, 3)), y).backward()
    optimizer.step()


class Towers(nn.Module):
    """Two towers, of which the second one reads the half of the first as well, if it ``ignores`` its own."""

    def __init__(self, *, ignores: bool) -> None:
        super().__init__()
        self.ignores = ignores
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x[:, :8]) * self.right(x[:, :8] if self.ignores else x[:, 8:])


@fault(probe="inputs", outcome="undecided", text=r"no value of columns 8 to 15 of the 16 of `x` of Towers;")
def half_of_an_input_is_ignored(injected: bool) -> None:
    fit(Towers(ignores=injected), images)


@fault(probe="first-loss", outcome="undecided", text=r"ln 4 is 1\.386: the outputs begin far from a guess")
def outputs_are_too_large(injected: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    if injected:
        nn.init.normal_(model[2].weight, std=5.0)
    fit(model, images)


@fault(probe="first-loss", outcome="undecided", text=r"the mean square of the targets is")
def outputs_have_another_unit(injected: bool) -> None:
    model = nn.Linear(16, 1)
    x = torch.randn(32, 16) * (30.0 if injected else 1.0)
    F.mse_loss(model(x), torch.randn(32, 1)).backward()


class Written(nn.Module):
    """A frozen body, which ``writes`` normalises in each forward, and a head."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.body, self.head = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.body.weight.div_(self.body.weight.norm())
        return self.head(self.body(x).relu())


@fault(probe="frozen", text=r"2 of 4 parameters are frozen, and the forward writes body\.weight")
def frozen_weight_is_written(injected: bool) -> None:
    fit(Written(writes=injected), images)


@fault(probe="frozen", outcome="undecided", text=r"running statistics of 1 move: it is in training mode")
def frozen_statistics_move(injected: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model[:2].requires_grad_(False)
    model[1].train(injected)
    fit(model, images)


class Cut(nn.Module):
    def __init__(self, *, detaches: bool) -> None:
        super().__init__()
        self.detaches = detaches
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head((hidden.detach() if self.detaches else hidden).relu())


@fault(
    probe="gradients",
    text=r"2 of 4 trained parameters; the loss changes with body\.weight, body\.bias, .* cut",
)
def body_is_detached(injected: bool) -> None:
    fit(Cut(detaches=injected), images)


@fault(
    probe="gradients", outcome="undecided", text=r"4 of 6 trained parameters; this loss does not use spare\."
)
def layer_is_not_called(injected: bool) -> None:
    model = Cut(detaches=False)
    if injected:
        model.spare = nn.Linear(2, 2)
    fit(model, images)


class Adapted(nn.Module):
    """A frozen layer with an adapter of rank 2, by the names that PEFT gives its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(16, 4).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(16, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})
        self.merged = self.detaches = False
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.lora_A["default"](x)
        added = self.lora_B["default"](inner)
        return self.base_layer(x) + (added.detach() if self.detaches else added)


def adapt(change: Callable[[Adapted], object]) -> None:
    """Train an adapter and a head behind it for a step."""
    adapted = Adapted()
    model = nn.Sequential(adapted, nn.Linear(4, 4))
    change(adapted)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    x, y = images()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


@fault(probe="adapters", text=r"all 2 adapter weights are frozen; load them with is_trainable=True")
def adapter_is_frozen(injected: bool) -> None:
    adapt(
        lambda adapted: (
            injected and adapted.lora_A.requires_grad_(False) and adapted.lora_B.requires_grad_(False)
        )
    )


@fault(probe="adapters", text=r"adapters are merged into 0: their own weights change no output")
def adapter_is_merged(injected: bool) -> None:
    adapt(lambda adapted: setattr(adapted, "merged", injected))


@fault(probe="adapters", text=r"0\.lora_A\.default\.weight and the lora_B behind it are both zero")
def adapter_begins_at_zero(injected: bool) -> None:
    adapt(lambda adapted: injected and nn.init.zeros_(adapted.lora_A["default"].weight))


@fault(probe="adapters", text=r"no gradient reaches 0\.lora_B\.default\.weight")
def adapter_is_detached(injected: bool) -> None:
    adapt(lambda adapted: setattr(adapted, "detaches", injected))


@fault(probe="adapters", text=r"0\.lora_B\.default\.weight is in no optimizer")
def adapter_is_in_no_optimizer(injected: bool) -> None:
    adapted = Adapted()
    model = nn.Sequential(adapted, nn.Linear(4, 4))
    parts = [adapted.lora_A, model[1]] if injected else [model]
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters() if p.requires_grad], lr=0.1)
    x, y = images()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
