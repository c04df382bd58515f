"""What the monitor activations measures, and that it leaves the training as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import backlight
from activation_runs import by_name, fit, squared, watched
from backlight.capture import call_hooks
from backlight.monitors.activations.model.layers import COLUMNS
from backlight.session.settings import DEFAULT_MONITORS, Settings
from cases import CASES, assert_equal


@pytest.fixture(autouse=True)
def _only_new_models(only_new_models: None) -> None:
    """Names of layers must not depend on earlier tests."""


class Convolutions(nn.Module):
    """Layers of several kinds, one activation that is called twice, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(6, 6, 1), nn.Tanh()) for _ in range(2)])
        self.relu, self.head = nn.ReLU(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.relu(x.mean((2, 3))))


def observed_by_hooks(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return output and gradient of every call by full hooks of torch, in fp64."""
    outputs: dict[str, list[Tensor]] = {}
    calls: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[[Any, Any, Tensor], None]:
        def keep(_module: Any, _args: Any, output: Tensor) -> None:
            outputs.setdefault(name, []).append(output)
            output.retain_grad()

        return keep

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name))
    squared(model, x).backward()
    for name, of in outputs.items():
        for number, output in enumerate(of, 1):
            assert output.grad is not None
            calls[name + (f"#{number}" if number > 1 else "")] = output.detach(), output.grad
    return calls


@pytest.mark.slow
def test_numbers_are_those_of_hooks_in_fp64(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Convolutions()
    inputs = [torch.randn(16, 2, 5, 5) for _ in range(2)]
    expected = []

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in inputs:
            expected.append(observed_by_hooks(copy.deepcopy(model).double(), x.double()))
            optimizer.zero_grad()
            squared(model, x).backward()
            optimizer.step()

    layers = by_name(watched(tmp_path / "run", train, rank=True))
    assert list(layers) == [
        "conv", "norm", "relu", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "relu#2", "head",
    ]  # fmt: skip
    for name, layer in layers.items():
        for step, calls in enumerate(expected):
            output, gradient = calls[name]
            wanted = {
                "rms": output.square().mean().sqrt(),
                "gradient": gradient.square().mean().sqrt(),
                "spread": (output.amax(0) - output.amin(0)).max() / output.abs().max(),
            }
            if layer.kind == "ReLU":
                wanted["zeros"] = (output == 0).double().mean()
            if layer.kind == "Tanh":
                wanted["saturated"] = (output.abs() > 0.99).double().mean()
            rows = output.movedim(1, -1).flatten(0, -2)
            squares = torch.linalg.svdvals(rows - rows.mean(0)) ** 2
            wanted["rank"] = squares.sum() ** 2 / (squares**2).sum()
            for column, value in wanted.items():
                assert layer[column].values[step] == pytest.approx(value.item(), rel=2e-4, abs=1e-9)
        assert layer.line.split(":")[0].endswith("test_monitor.py")
        assert layer.is_hidden == (name != "head")
    assert layers["norm"].input == "conv"
    assert layers["relu"].units == layers["conv"].units == 6
    assert set(layers["relu"].columns) <= set(COLUMNS)


@pytest.mark.slow
def test_dead_units_are_those_that_gave_nothing_in_all_samples(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 3))
    with torch.no_grad():
        model[0].bias[:4] = -1e3
    layers = by_name(watched(tmp_path / "run", lambda: fit(model, (64, 4), steps=8)))
    assert layers["1"]["dead"].steps.tolist() == [3, 4, 5, 6, 7]  # from the 256th value of a unit on
    assert layers["1"]["dead"].values.tolist() == [0.4] * 5
    assert layers["0"]["dead"].values.tolist() == [0.4] * 5  # never positive, and without a gradient
    assert "dead" not in layers["2"].columns or not layers["2"]["dead"].values.any()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in {"forked_workers"}])
def test_training_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected = case.train()
    options = {"every": 1, "rank": True}
    with backlight.watch(
        run=tmp_path / "run", monitors=("health", "activations"), activations=options, quiet=True
    ):
        actual = case.train()
    assert_equal(expected, actual)
    run = backlight.open_run(tmp_path / "run")
    assert not [event for event in run.events("unmeasured") if "after" in str(event.payload["what"])]
    assert not call_hooks._replaced


class Checkpointed(nn.Module):
    """A region that is computed again in backward."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self._inside, self.first(x), use_reentrant=self.is_reentrant))

    def _inside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


@pytest.mark.slow
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_recomputation_is_not_measured_again(is_reentrant: bool, tmp_path: Path) -> None:
    model = Checkpointed(is_reentrant=is_reentrant)
    layers = by_name(watched(tmp_path / "run", lambda: fit(model, steps=3)))
    assert set(layers) == {"first", "body", "last"}
    assert len(layers["body"]["rms"].steps) == 3
    # The forward of a re-entrant region has no graph.
    assert len(layers["body"]["gradient"].steps) == (0 if is_reentrant else 3)


@pytest.mark.slow
@pytest.mark.parametrize("with_gradients", [False, True])
def test_an_evaluation_is_not_measured(with_gradients: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(4):
            model.train()
            optimizer.zero_grad()
            squared(model, torch.randn(64, 8)).backward()
            optimizer.step()
            model.eval()
            with torch.set_grad_enabled(with_gradients):
                model(1e3 * torch.randn(64, 8))

    values = by_name(watched(tmp_path / "run", train))["0"]["rms"].values
    assert len(values) == 4
    assert values.max() < 10


@pytest.mark.slow
def test_forwards_that_no_backward_reaches_are_not_measured(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(3):
            for _ in range(5):
                model(1e3 * torch.randn(1, 8)).argmax()  # an action
            optimizer.zero_grad()
            for _ in range(2):
                squared(model, torch.randn(64, 8)).backward()
            optimizer.step()

    layer = by_name(watched(tmp_path / "run", train))["0"]
    assert layer.size == 64 * 8
    assert len(layer["rms"].values) == 3
    assert layer["rms"].values.max() < 10


class Recurrent(nn.Module):
    """A layer that gives a tuple, one that takes two inputs, and one that takes integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(9, 8), nn.LSTM(8, 8, batch_first=True)
        self.mix, self.head = nn.Bilinear(8, 8, 4), nn.Linear(4, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, (last, _) = self.rnn(self.embedding(tokens))
        return self.head(self.mix(hidden[:, -1], last[0]))


@pytest.mark.slow
def test_tuples_integers_and_several_inputs(tmp_path: Path) -> None:
    model = Recurrent()

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randint(0, 9, (16, 5))).square().mean().backward()
            optimizer.step()

    layers = by_name(watched(tmp_path / "run", train))
    assert list(layers) == ["embedding", "rnn", "mix", "head"]
    assert all((layer["gradient"].values > 0).all() for layer in layers.values())
    assert "input_spread" not in layers["embedding"].columns
    assert layers["rnn"].size == 16 * 5 * 8


@pytest.mark.slow
def test_a_loss_scale_is_no_part_of_a_gradient(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def train(scale: float) -> Callable[[], None]:
        def loop() -> None:
            torch.manual_seed(0)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            for _ in range(3):
                optimizer.zero_grad()
                with torch.autocast("cpu"):
                    loss = squared(model, torch.randn(64, 8))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

        return loop

    plain = by_name(watched(tmp_path / "plain", train(1.0)))
    scaled = by_name(watched(tmp_path / "scaled", train(1024.0)))
    for name, layer in plain.items():
        assert len(layer["gradient"].values) == 3
        assert scaled[name]["gradient"].values == pytest.approx(layer["gradient"].values, rel=1e-12)


@pytest.mark.slow
def test_both_models_of_an_adversarial_training_are_measured(tmp_path: Path) -> None:
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    critic = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 1))

    def train() -> None:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (generator, critic)]
        for number in range(80):
            for optimizer in optimizers:
                optimizer.zero_grad()
            fake = generator(torch.randn(16, 4))
            if number % 2:
                critic(fake).mean().backward()
            else:
                (critic(fake.detach()) - critic(torch.randn(16, 8))).mean().backward()
            optimizers[1 - number % 2].step()

    layers = by_name(watched(tmp_path / "run", train, every=None))
    assert len({layer.model for layer in layers.values()}) == 2
    by_kind = {layer.kind: layer for layer in layers.values()}
    assert set(by_kind) == {"Linear", "Tanh", "LeakyReLU"}
    steps = {kind: set(layer["rms"].steps % 2) for kind, layer in by_kind.items()}
    assert steps["Tanh"] == {1}  # where the generator is trained
    assert steps["LeakyReLU"] == {0, 1}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_part_is_measured_at_its_boundary(tmp_path: Path) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="aot_eager")
    model = nn.Sequential(nn.Linear(8, 8), compiled, nn.Linear(8, 1))
    counters.clear()
    run = watched(tmp_path / "run", lambda: fit(model, steps=6), every=2)
    layers = by_name(run)
    assert list(layers) == ["0", "1", "2"]
    assert all(layer["gradient"].steps.tolist() == [2, 4] for layer in layers.values())
    assert counters["stats"]["unique_graphs"] == 1  # compiled in a step that is not measured
    (event,) = run.events("unmeasured")
    assert event.payload["what"] == "activations inside `1`"
    assert "compiled" in event.payload["reason"]


@pytest.mark.slow
def test_code_is_compiled_once_whether_a_step_is_measured_or_not(tmp_path: Path) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    step = torch.compile(squared, backend="aot_eager")
    run = watched(tmp_path / "run", lambda: fit(model, steps=8, loss=step), every=2)
    assert counters["stats"]["unique_graphs"] == 1
    assert not by_name(run)
    (event,) = run.events("unmeasured")
    assert event.payload["what"] == "activations"
    assert "what calls it is compiled" in event.payload["reason"]


@pytest.mark.slow
def test_nothing_stays_in_classes_and_models_between_measured_steps(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    calls: list[bool] = []

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append("__call__" in vars(nn.Linear))
            return x

    model.append(Noting())
    watched(tmp_path / "run", lambda: fit(model, steps=7), every=3)
    assert calls == [True, False, False, True, False, False, True]
    assert "__call__" not in vars(nn.Linear)
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


class Failing(nn.Module):
    """Raises at its second call, which the loop catches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.layer(x)
        if self.calls == 2:
            raise ValueError("mine")
        return x


@pytest.mark.slow
def test_a_forward_that_raises_leaves_the_classes_as_they_were(tmp_path: Path) -> None:
    model = Failing()

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            try:
                squared(model, torch.randn(16, 8)).backward()
            except ValueError:
                continue
            optimizer.step()

    layers = by_name(watched(tmp_path / "run", train))
    assert len(layers["layer"]["rms"].steps) >= 2
    assert "__call__" not in vars(nn.Linear)


@pytest.mark.slow
def test_an_error_in_a_hook_disables_the_monitor_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backlight.measure import activations as measure

    def fail(_x: Tensor) -> Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(measure, "norm", fail)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with pytest.warns(RuntimeWarning, match="activations.*no memory"):
        watched(tmp_path / "run", lambda: fit(model))
    assert "__call__" not in vars(nn.Linear)


def test_names_with_a_plus_are_added_to_the_default_monitors() -> None:
    assert Settings.of({"monitors": "+activations"}).monitors == (*DEFAULT_MONITORS, "activations")
    assert Settings.of({"monitors": ["+health", "+spectra"]}).monitors == (*DEFAULT_MONITORS, "spectra")
    assert Settings.of({"monitors": "activations"}).monitors == ("activations",)
    with pytest.raises(ValueError, match=r"a \+ before every name, or before none, got health,\+activations"):
        Settings.of({"monitors": "health,+activations"})
