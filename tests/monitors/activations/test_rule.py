"""Injected faults that the rule ``activations`` finds, with their twins, and programs that come close."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from activation_runs import fit, reported, squared, watched
from backlight.records import Severity

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _only_new_models(only_new_models: None) -> None:
    """Names of layers must not depend on earlier tests."""


@dataclass(frozen=True)
class Injected:
    """A training loop with a fault that its argument injects, and what is to be reported of it."""

    train: Callable[[bool], None]
    module: str
    severity: Severity
    title: str


FAULTS: dict[str, Injected] = {}


def fault(
    module: str, title: str, severity: Severity = Severity.WARNING
) -> Callable[[Callable[[bool], None]], Callable[[bool], None]]:
    """Register a training loop under the name of its function."""

    def register(train: Callable[[bool], None]) -> Callable[[bool], None]:
        FAULTS[train.__name__] = Injected(train, module, severity, title)
        return train

    return register


def mlp(activation: Callable[[], nn.Module] = nn.ReLU, width: int = 32, depth: int = 2) -> nn.Sequential:
    """Return linear layers with activations between them."""
    layers: list[nn.Module] = [nn.Linear(8, width), activation()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


@fault("3", "All units of `3` are dead")
def bias_that_kills_a_layer(injected: bool) -> None:
    model = mlp()
    with torch.no_grad():
        model[2].bias -= 50 * injected
    fit(model)


class Functional(nn.Module):
    """A network whose activations are functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))))


@fault("second", "All units of `second` are dead")
def function_that_gets_negative_values_only(injected: bool) -> None:
    model = Functional()
    with torch.no_grad():
        model.second.bias -= 50 * injected
    fit(model)


@fault("1", "All units of `1` are dead")
def step_that_overshoots(injected: bool) -> None:
    model = mlp(depth=1)
    with torch.no_grad():
        model[0].weight.abs_()
        model[2].weight.abs_()
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0 if injected else 1e-3)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.rand(64, 8)).mean().mul(100).backward()
        optimizer.step()


@fault("1", "62.5 % of the units of `1` are dead", Severity.INFO)
def more_than_half_of_a_layer_is_dead(injected: bool) -> None:
    model = mlp(depth=1)
    with torch.no_grad():
        model[0].bias[:20] -= 50 * injected
    fit(model)


@fault("1", "`1` is saturated")
def inputs_that_are_not_scaled(injected: bool) -> None:
    model = mlp(nn.Tanh)
    fit(model, loss=lambda m, x: (m(x * (300 if injected else 1)).sum(1) - x.sum(1)).square().mean())


@fault("3", "`3` is saturated")
def sigmoid_of_large_weights(injected: bool) -> None:
    model = mlp(nn.Sigmoid)
    with torch.no_grad():
        model[2].weight *= 3000 if injected else 1
    fit(model)


class Gated(nn.Module):
    """A normalisation between two layers, over one value or over all of them."""

    def __init__(self, between: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.between, self.head = nn.Linear(8, width), between, nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.first(x)))


@fault("between", "The output of `between` is the same for every sample")
def softmax_over_one_value(injected: bool) -> None:
    fit(Gated(nn.Softmax(dim=1), 1 if injected else 8))


@fault("between", "The output of `between` is the same for every sample")
def normalisation_over_one_value(injected: bool) -> None:
    width = 1 if injected else 8
    fit(Gated(nn.LayerNorm(width), width))


@fault("2", "The output of `2` is the same for every sample")
def weights_that_are_set_to_zero_in_every_step(injected: bool) -> None:
    model = mlp(nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(6):
        with torch.no_grad():
            model[2].weight *= not injected
        optimizer.zero_grad()
        squared(model, torch.randn(64, 8)).backward()
        optimizer.step()


@fault("0", "The gradient shrinks ")
def deep_network_of_small_derivatives(injected: bool) -> None:
    fit(mlp(nn.Sigmoid if injected else nn.Tanh, depth=16))


@fault("32", "The signal grows ")
def deep_network_of_large_weights(injected: bool) -> None:
    model = mlp(depth=16)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight *= 12 if injected else 2
    fit(model, lr=0.0)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_its_twin_is_silent(name: str, tmp_path: Path) -> None:
    injected = FAULTS[name]
    run = watched(tmp_path / "faulty", lambda: injected.train(True))
    finding = next(f for f in reported(run) if f.title.startswith(injected.title))
    assert finding.subject.module == injected.module
    assert finding.severity is injected.severity
    assert finding.subject.line is not None
    for evidence in finding.evidence:
        scalar = run.scalar(evidence.path.removeprefix("scalars/"))
        assert float(evidence.value) == scalar.values[list(scalar.steps).index(evidence.step)]
    assert reported(watched(tmp_path / "sound", lambda: injected.train(False))) == []


# Programs that come close


CONTROLS: list[Callable[[], None]] = []


def control(train: Callable[[], None]) -> Callable[[], None]:
    """Register a program that is to be silent."""
    CONTROLS.append(train)
    return train


@control
def relu_network_with_usual_sparsity() -> None:
    fit(mlp(width=256, depth=4), (128, 8), steps=12)


@control
def gelu_of_negative_values() -> None:
    model = mlp(nn.GELU)
    with torch.no_grad():
        model[2].bias -= 4
    fit(model)


@control
def heavy_dropout() -> None:
    model = nn.Sequential(
        nn.Linear(8, 64),
        nn.ReLU(),
        nn.Dropout(0.9),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Dropout(0.9),
        nn.Linear(64, 1),
    )
    fit(model, (16, 8), steps=16)


class Experts(nn.Module):
    """Experts of which the router leaves some without tokens in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 8)
        self.experts = nn.ModuleList(mlp(width=16, depth=1) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros(len(x), 1)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out * weights[:, None]


@control
def experts_without_tokens() -> None:
    fit(Experts(), (12, 8), steps=12)


class DenseExperts(Experts):
    """Experts that all compute, and of which a mask keeps one per token."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        mask = F.one_hot(weights.argmax(-1), 8)
        return (torch.cat([expert(x) for expert in self.experts], 1) * mask * weights).sum(1, keepdim=True)


@control
def experts_behind_a_mask() -> None:
    fit(DenseExperts(), (64, 8), steps=8)


class Tokens(nn.Module):
    """A transformer of padded sequences, with embeddings of tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, 16, padding_idx=0), nn.Embedding(12, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 3), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return self.head(self.body(hidden, src_key_padding_mask=x == 0))


@control
def padded_sequences() -> None:
    model = Tokens()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(8):
        x = torch.randint(1, 64, (16, 12)) * (torch.arange(12) < torch.randint(2, 13, (16, 1)))
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), x.flatten(), ignore_index=0).backward()
        optimizer.step()


class Adapted(nn.Module):
    """A frozen layer with a low-rank update that begins at zero."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


@control
def low_rank_update_that_begins_at_zero() -> None:
    fit(nn.Sequential(nn.Linear(8, 32), Adapted(), nn.ReLU(), Adapted(), nn.Linear(32, 1)), steps=8)


class Residual(nn.Module):
    """A branch that begins at zero: by its scale, as in ReZero, or by its last layer, as in Fixup."""

    def __init__(self, *, is_scaled: bool) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.scale = nn.Parameter(torch.zeros(()) if is_scaled else torch.ones(()))
        if not is_scaled:
            nn.init.zeros_(self.branch[2].weight)
            nn.init.zeros_(self.branch[2].bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.branch(x)


@control
def branches_that_begin_at_zero() -> None:
    for is_scaled in (True, False):
        blocks = [Residual(is_scaled=is_scaled) for _ in range(12)]
        fit(nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 1)), steps=8)


@control
def gates_that_close_while_they_learn() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.gate, self.sigmoid = nn.Linear(8, 32), nn.Linear(8, 32), nn.Sigmoid()
            self.head = nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.value(x) * self.sigmoid(self.gate(x)))

    model = Gate()
    with torch.no_grad():
        model.gate.bias -= 8
    fit(model)


@control
def one_probability_that_is_nearly_one() -> None:
    model = Gated(nn.Softmax(dim=1), 8)
    with torch.no_grad():
        model.first.weight *= 1000
    fit(model)


@control
def images_between_minus_one_and_one() -> None:
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8), nn.Tanh())
    critic = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())
    with torch.no_grad():
        generator[2].weight *= 300
        critic[2].weight *= 300
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in (generator, critic)]
    for number in range(16):
        for optimizer in optimizers:
            optimizer.zero_grad()
        fake = generator(torch.randn(64, 4))
        if number % 2:
            (1 - critic(fake)).mean().backward()
        else:
            (critic(fake.detach()) - critic(torch.randn(64, 8).sign())).mean().backward()
        optimizers[1 - number % 2].step()


@control
def actions_that_are_never_taken() -> None:
    class Duelling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
            self.value, self.advantage = nn.Linear(32, 1), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x)
            return self.value(hidden) + self.advantage(hidden)

    model = Duelling()
    with torch.no_grad():
        model.advantage.bias -= 5
    fit(model, loss=lambda m, x: (m(x)[:, 0] + 1).square().mean(), steps=10)


@control
def embeddings_of_which_few_are_used() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(1000, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.bag(x))

    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randint(0, 5, (64, 3))), torch.randint(0, 2, (64,))).backward()
        optimizer.step()


@control
def batches_of_one_sample() -> None:
    fit(mlp(width=64), (1, 8), steps=40)


@control
def run_of_three_steps_with_a_dead_layer() -> None:
    model = mlp()
    with torch.no_grad():
        model[2].bias -= 50
    fit(model, steps=3)


@pytest.mark.parametrize("train", CONTROLS, ids=lambda train: train.__name__)
def test_a_program_that_comes_close_is_silent(train: Callable[[], None], tmp_path: Path) -> None:
    assert [finding.title for finding in reported(watched(tmp_path / "run", train))] == []
