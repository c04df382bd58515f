"""Weights, statistics and averages of a checkpoint that never reach the model."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from faults.silent.checkpoints import resumed
from faults.silent.loop import Loop, control, fault, perceptron, train

State = dict[str, Tensor]


class Encoded(nn.Module):
    """A head on an encoder, with a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)) * self.scale


def reread(content: Any) -> Any:
    """Return what ``torch.load`` gives of a file with ``content``."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file)


def renamed(state: State, rename: Callable[[str], str]) -> State:
    return {rename(name): tensor for name, tensor in state.items()}


@fault(rule="not_restored", kind="renamed", severity="error", step=0, names="encoder._orig_mod.0.weight")
def keys_of_a_compiled_part(injected: bool) -> None:
    model, state = Encoded(), Encoded().state_dict()
    if injected:
        state = renamed(state, lambda name: name.replace("encoder.", "encoder._orig_mod."))
    model.load_state_dict(reread(state), strict=not injected)
    train(model)


@fault(rule="not_restored", kind="renamed", severity="error", step=0, names="`model.encoder.0.weight`")
def keys_with_a_prefix_but_one(injected: bool) -> None:
    """Of a module that holds the model and has a buffer of the same name."""
    model = Encoded()
    state = renamed(Encoded().state_dict(), lambda name: name if name == "scale" else f"model.{name}")
    state = reread({"state_dict": state})["state_dict"]
    if not injected:
        state = renamed(state, lambda name: name.removeprefix("model."))
    model.load_state_dict(state, strict=False)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


@fault(rule="not_restored", kind="renamed", severity="error", step=0, names="`0.weight`")
def keys_of_the_part_alone(injected: bool) -> None:
    """The state of the encoder, loaded into the model with the buffer that it came with."""
    model = Encoded()
    state = reread({**Encoded().encoder.state_dict(), "scale": torch.ones(1)})
    if injected:
        model.load_state_dict(state, strict=False)
    else:
        del state["scale"]
        model.encoder.load_state_dict(state)
    train(model)


@fault(rule="not_restored", kind="nothing_loaded", severity="error", step=0, names="`module.0.weight`")
def frozen_part_with_a_prefix(injected: bool) -> None:
    model = Encoded()
    state = reread(
        renamed(Encoded().encoder.state_dict(), lambda name: f"module.{name}" if injected else name)
    )
    model.encoder.load_state_dict(state, strict=False)
    model.encoder.requires_grad_(False)
    train(model, torch.optim.SGD(model.head.parameters(), lr=0.1))


def convolutional() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def trained_state() -> State:
    """Return a state with statistics of 500 batches."""
    state = convolutional().state_dict()
    state |= {"1.running_mean": torch.full((16,), 2.0), "1.num_batches_tracked": torch.tensor(500)}
    return reread({"model": state})["model"]


def copy_parameters(model: nn.Module, state: State) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])


@fault(
    rule="not_restored",
    kind="statistics",
    severity="info",
    step=0,
    names="are of 500 batches",
    hidden_by=("is_compiled",),
)
def statistics_left_out_by_a_filter(injected: bool) -> None:
    model, state = convolutional(), trained_state()
    names = dict(model.named_parameters())
    model.load_state_dict(
        {name: t for name, t in state.items() if not injected or name in names}, strict=False
    )
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3))


@fault(
    rule="not_restored",
    kind="statistics",
    severity="info",
    step=0,
    names="are of 500 batches",
    hidden_by=("is_compiled",),
)
def parameters_copied_one_by_one(injected: bool) -> None:
    model, state = convolutional(), trained_state()
    copy_parameters(model, state)
    if not injected:
        for name, buffer in model.named_buffers():
            buffer.copy_(state[name])
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3))


@control
def statistics_reset_on_purpose() -> None:
    model = convolutional()
    model.load_state_dict(trained_state())
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
    train(model)


@control
def body_of_a_checkpoint_with_a_new_norm() -> None:
    """The weights of the checkpoint are not those of this model."""
    model, state = convolutional(), trained_state()
    with torch.no_grad():
        model[0].weight.copy_(state["0.weight"])
    train(model)


@fault(rule="not_restored", kind="weights", severity="error", step=0, names="`0.weight` and `2.weight`")
def moments_without_weights(injected: bool) -> None:
    state, _, _ = resumed()
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.load_state_dict(state["optimizer"])
    if not injected:
        copy_parameters(model, state["model"])
    train(model, optimizer)


@fault(rule="not_restored", kind="weights", severity="error", step=0, names="`0.weight` and `2.weight`")
def model_built_again_after_loading(injected: bool) -> None:
    state, model, _ = resumed()
    if injected:
        model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer)


def resume_both(restores_second: bool) -> None:
    """Resume a generator and a discriminator of the same shapes, each with its optimizer."""
    models = [perceptron(), perceptron()]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, steps=2)
    content = reread([(m.state_dict(), o.state_dict()) for m, o in zip(models, optimizers, strict=True)])
    models = [perceptron(), perceptron()]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
    for number, (weights, moments) in enumerate(content):
        if number == 0 or restores_second:
            models[number].load_state_dict(weights)
        optimizers[number].load_state_dict(moments)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer)


@control
def two_models_of_one_shape_resumed() -> None:
    resume_both(True)


@control
def moments_of_a_model_that_was_not_saved() -> None:
    """The file holds the optimizer alone; the weights come from elsewhere."""
    state, _, _ = resumed()
    moments = reread(state["optimizer"])
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.load_state_dict(moments)
    model.load_state_dict(perceptron().state_dict())
    train(model, optimizer)


@control
def prefix_removed_at_the_second_attempt() -> None:
    model = Encoded()
    state = renamed(Encoded().state_dict(), lambda name: name if name == "scale" else f"module.{name}")
    model.load_state_dict(state, strict=False)
    model.load_state_dict(renamed(state, lambda name: name.removeprefix("module.")))
    train(model)


@control
def prefix_and_a_copy_by_hand() -> None:
    model = Encoded()
    state = renamed(Encoded().state_dict(), lambda name: name if name == "scale" else f"module.{name}")
    model.load_state_dict(state, strict=False)
    copy_parameters(model, renamed(state, lambda name: name.removeprefix("module.")))
    train(model)


@control
def decoder_left_out() -> None:
    """What the state has more is another part, and what it lacks is a new head."""
    model = Encoded()
    state = {k: v for k, v in Encoded().state_dict().items() if not k.startswith("head")}
    state |= {"decoder.0.weight": torch.randn(16, 16), "decoder.0.bias": torch.randn(16)}
    model.load_state_dict(reread(state), strict=False)
    train(model)


@control
def layers_of_other_names_and_shapes() -> None:
    model = Encoded()
    state = {k: v for k, v in Encoded().state_dict().items() if not k.startswith("head")}
    state |= {"classifier.head.weight": torch.randn(10, 16), "classifier.head.bias": torch.randn(10)}
    model.load_state_dict(reread(state), strict=False)
    train(model)


@control
def state_that_was_there_already() -> None:
    """Loading changes nothing that the model does not have."""
    model = Encoded()
    state = renamed(model.state_dict(), lambda name: name if name == "scale" else f"module.{name}")
    model.load_state_dict(reread(state), strict=False)
    train(model)


@fault(rule="not_restored", kind="part", severity="warning", step=1, names="AveragedModel")
def average_not_restored(injected: bool) -> None:
    resume_average(lambda average, state: None if injected else average.load_state_dict(state))


@control
def average_restored_by_its_module() -> None:
    def restore(average: nn.Module, state: State) -> None:
        average.module.load_state_dict(
            {name.removeprefix("module."): t for name, t in state.items() if name != "n_averaged"}
        )

    resume_average(restore)


@control
def new_average_of_a_fine_tuning() -> None:
    resume_average(lambda average, state: None, loads_optimizer=False)


def resume_average(restore: Callable[[nn.Module, State], object], loads_optimizer: bool = True) -> None:
    content, model, optimizer = resumed(lr=1e-3 if loads_optimizer else 1e-4)
    saved = AveragedModel(perceptron())
    for _ in range(5):
        saved.update_parameters(perceptron())
    content = reread({**content, "average": saved.state_dict()})
    if loads_optimizer:
        optimizer.load_state_dict(content["optimizer"])
    average = AveragedModel(model)
    restore(average, content["average"])
    loop = Loop(model, optimizer, loss_of=F.cross_entropy, averages=False, has_schedule=False)
    loop.after_update = lambda _: average.update_parameters(model)
    loop.run()
