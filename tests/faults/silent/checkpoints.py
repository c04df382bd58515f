"""Checkpoints of which the training run does not begin with everything."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from faults.silent.loop import Loop, control, fault, perceptron, train


def checkpoint() -> Any:
    """Return what ``torch.load`` gives of a run with Adam."""
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3).state_dict()
    for number, parameter in enumerate(model.parameters()):
        moments = {"exp_avg": torch.rand_like(parameter), "exp_avg_sq": torch.rand_like(parameter)}
        optimizer["state"][number] = {"step": torch.tensor(5.0), **moments}
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer, "epoch": 1}, file)
    file.seek(0)
    return torch.load(file)


def resumed(lr: float = 1e-3) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """Return a checkpoint, a new model with its weights, and a new optimizer."""
    state, model = checkpoint(), perceptron()
    model.load_state_dict(state["model"])
    return state, model, torch.optim.Adam(model.parameters(), lr=lr)


def initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)


@fault(rule="not_restored", kind="optimizer_state", severity="warning", step=0, names="The state of Adam")
def optimizer_state_not_restored(injected: bool) -> None:
    state, model, optimizer = resumed()
    if not injected:
        optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer)


@fault(rule="not_restored", kind="overwritten", severity="warning", step=0, names="`0.weight` and `2.weight`")
def initialised_after_loading(injected: bool) -> None:
    model = perceptron()
    if not injected:
        initialise(model)
    model.load_state_dict(checkpoint()["model"])
    if injected:
        initialise(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@fault(rule="not_restored", kind="nothing_loaded", severity="error", step=0, names="`module.0.weight`")
def keys_with_a_prefix(injected: bool) -> None:
    model = perceptron()
    state = {f"module.{key}" if injected else key: one for key, one in checkpoint()["model"].items()}
    model.load_state_dict(state, strict=False)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@control
def fine_tuned_with_other_settings() -> None:
    _, model, optimizer = resumed(lr=1e-4)
    train(model, optimizer)


@control
def new_head_on_loaded_weights() -> None:
    """The head of another size is initialised, and so is its optimizer."""
    body = checkpoint()["model"]
    model = perceptron(nn.ReLU(), nn.Linear(3, 5))
    model.load_state_dict(body, strict=False)
    train(model, torch.optim.Adam(model.parameters(), lr=1e-3))


@control
def last_layer_initialised_again() -> None:
    model = perceptron()
    model.load_state_dict(checkpoint()["model"])
    model[2].reset_parameters()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@control
def shrunk_and_perturbed() -> None:
    model = perceptron()
    model.load_state_dict(checkpoint()["model"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(0.02 * torch.randn_like(parameter))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@control
def best_weights_loaded_in_between() -> None:
    """The optimizer goes on with the state that it has."""
    state, model, optimizer = resumed(lr=2e-3)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 1e-3
    model.load_state_dict(state["model"])
    train(model, optimizer)


class Tied(nn.Module):
    """Classifies sequences by embeddings that are also the weights of its head."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x).mean(1))


def loaded(model: nn.Module, state: Any) -> nn.Module:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    return model


def train_sequences(model: nn.Module) -> None:
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), data=sequences)


def sequences(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        x = torch.randint(0, 7, (8, 5))
        yield x, x[:, 0]


@fault(
    rule="not_restored",
    kind="untied",
    severity="warning",
    step=0,
    names="`embedding.weight` and `head.weight`",
)
def tie_lost_when_loading(injected: bool) -> None:
    train_sequences(loaded(Tied(not injected), Tied(True).state_dict()))


@fault(rule="trained_tensors", kind="untied", severity="warning", step=0, names="`head.weight`")
def tie_lost_when_assigning(injected: bool) -> None:
    """Each name gets a parameter of its own."""
    model = Tied(True)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=injected)
    train_sequences(model)


@fault(rule="trained_tensors", kind="untied", severity="warning", step=0, names="`head.weight`")
def tie_lost_when_resizing(injected: bool) -> None:
    model = Tied(True)
    model.embedding = nn.Embedding(9, 8)
    if not injected:
        model.head.weight = model.embedding.weight
    train_sequences(model)


@fault(rule="trained_tensors", kind="untied", severity="warning", step=0, names="`head.weight`")
def tie_lost_when_allocating(injected: bool) -> None:
    with torch.device("meta"):
        model = Tied(True)
    model.to_empty(device="cpu")
    if not injected:
        model.head.weight = model.embedding.weight
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    train_sequences(model)


@control
def swapped_layers() -> None:
    model = perceptron(nn.Linear(3, 3))
    last = nn.Linear(3, 3)
    last.weight, model[3].weight = model[3].weight, last.weight
    train(model.append(last), torch.optim.SGD(model.parameters(), lr=0.1))


@control
def layer_put_before_another() -> None:
    model = perceptron()
    model[0] = nn.Sequential(nn.Linear(4, 4), model[0])
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@control
def tied_after_loading() -> None:
    model = loaded(Tied(False), Tied(True).state_dict())
    model.head.weight = model.embedding.weight
    train_sequences(model)


@control
def copies_of_one_matrix_that_begin_alike() -> None:
    state = Tied(False).state_dict()
    state["head.weight"] = state["embedding.weight"].clone()
    train_sequences(loaded(Tied(False), state))


@fault(rule="not_restored", kind="rate", severity="warning", step=0, names="replaces that of the script")
def rate_of_the_checkpoint(injected: bool) -> None:
    state, model, optimizer = resumed(lr=1e-5)
    optimizer.load_state_dict(state["optimizer"])
    if not injected:
        for group in optimizer.param_groups:
            group["lr"] = 1e-5
    train(model, optimizer, has_schedule=False)


@fault(rule="not_restored", kind="rate", severity="warning", step=0, names="replaces that of the script")
def first_rate_of_the_schedule_in_the_checkpoint(injected: bool) -> None:
    state, model, optimizer = resumed(lr=1e-5 if injected else 1e-3)
    for group in state["optimizer"]["param_groups"]:
        group["initial_lr"], group["lr"] = 1e-3, 5e-4
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, has_schedule=False)


@control
def rate_of_a_schedule() -> None:
    """The schedule has lowered the rate since the optimizer was built, in this run and in the last one."""
    state, model, optimizer = resumed()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    state["optimizer"]["param_groups"][0] |= {"initial_lr": 1e-3, "lr": 4e-4}
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(schedule.state_dict() | {"last_epoch": 50, "_last_lr": [4e-4]})
    train(model, optimizer, has_schedule=False)


@control
def rate_of_a_warm_up() -> None:
    """A warm-up has set a small rate as it was built; the state holds the rate that it had reached."""
    state, model, optimizer = resumed()
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.01)
    state["optimizer"]["param_groups"][0] |= {"initial_lr": 1e-3, "lr": 7e-4}
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, has_schedule=False)


@control
def rates_of_groups() -> None:
    """Groups with rates of their own, as the script gives them again."""
    model = perceptron()
    groups = [{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[2].parameters()}]
    state = torch.optim.AdamW(groups, lr=1e-3).state_dict()
    groups = [{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    optimizer.load_state_dict(state)
    train(model, optimizer)


@control
def rate_set_by_hand() -> None:
    """The loop sets the rate of every step itself."""
    state, model, optimizer = resumed(lr=1e-2)
    optimizer.load_state_dict(state["optimizer"])
    loop = Loop(model, optimizer, has_schedule=False)

    def set_rate(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.9**step

    loop.before_step = set_rate
    loop.run()


class Scaled(nn.Module):
    """A perceptron with a buffer that no state holds; whatever is in it, the output is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)
        self.register_buffer("scales", torch.zeros(16), persistent=False)
        self.reset()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * (1 + self.scales.nan_to_num().clamp(-0.5, 0.5)))

    def reset(self) -> None:
        self.scales.copy_(torch.linspace(-0.5, 0.5, 16))


def from_meta(fill: Callable[[Scaled], object]) -> None:
    """Train a model that was made on the meta device, and loaded."""
    state = Scaled().state_dict()
    with torch.device("meta"):
        model = Scaled()
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    fill(model)
    train(model)


@fault(rule="not_restored", kind="left_empty", severity="error", step=0, names="`scales`")
def buffer_left_empty(injected: bool) -> None:
    from_meta(lambda model: None if injected else model.reset())


@fault(rule="not_restored", kind="left_empty", severity="error", step=0, names="`last.bias`")
def parameter_left_empty(injected: bool) -> None:
    with torch.device("meta"):
        model = perceptron()
    names = ("first.weight", "first.bias", "last.weight", "last.bias")
    model = nn.Sequential(OrderedDict(first=model[0], between=model[1], last=model[2]))
    model.to_empty(device="cpu")
    for name in names:
        if not (injected and name == "last.bias"):
            nn.init.normal_(model.get_parameter(name), std=0.3)
    train(
        lambda x: model(x).nan_to_num().clamp(-10, 10),
        torch.optim.SGD(model.parameters(), lr=0.1),
        parts=(model,),
    )


@control
def buffer_written_through_data() -> None:
    from_meta(lambda model: model.scales.data.copy_(torch.linspace(-0.5, 0.5, 16)))


@control
def buffer_replaced() -> None:
    from_meta(lambda model: setattr(model, "scales", torch.linspace(-0.5, 0.5, 16)))


@control
def emptied_and_loaded_by_assignment() -> None:
    state = perceptron().state_dict()
    with torch.device("meta"):
        model = perceptron()
    model.to_empty(device="cpu")
    model.load_state_dict(state, assign=True)
    train(model)


@control
def emptied_teacher_that_is_not_used() -> None:
    with torch.device("meta"):
        unused = perceptron()
    unused.to_empty(device="cpu")
    train(perceptron())
    assert unused.training


SAVED_STEPS = 20

Make = Callable[[torch.optim.Optimizer], Any]


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)


def resumed_with_a_schedule(
    restore: Callable[[Any, Any], object],
    *,
    make: Make = cosine,
    loads_optimizer: bool = True,
    saved: Make = cosine,
    last: int = SAVED_STEPS,
    lr: float = 1e-3,
) -> None:
    """Resume a run whose schedule was at step ``last``; ``restore(schedule, its state)``."""
    content, model, optimizer = resumed(lr)
    before = saved(torch.optim.Adam(perceptron().parameters(), lr=1e-3))
    content["scheduler"] = before.state_dict() | {"last_epoch": last}
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    content = torch.load(file)
    if loads_optimizer:
        optimizer.load_state_dict(content["optimizer"])
    schedule = make(optimizer)
    restore(schedule, content["scheduler"])
    loop = Loop(model, optimizer, has_schedule=False)
    loop.after_update = lambda _: schedule.step()
    loop.run()


@fault(rule="not_restored", kind="part", severity="warning", step=0, names="The state of CosineAnnealingLR")
def schedule_not_restored(injected: bool) -> None:
    resumed_with_a_schedule(lambda schedule, state: None if injected else schedule.load_state_dict(state))


@fault(rule="not_restored", kind="part", severity="warning", step=0, names="The state of OneCycleLR")
def one_cycle_not_restored(injected: bool) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=100)

    resumed_with_a_schedule(
        lambda schedule, state: None if injected else schedule.load_state_dict(state), make=make, saved=make
    )


def steps_up(schedule: Any, state: Any) -> None:
    for _ in range(state["last_epoch"]):
        schedule.step()


def of_last_step(optimizer: torch.optim.Optimizer) -> Any:
    for group in optimizer.param_groups:
        group["initial_lr"] = 1e-3
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100, last_epoch=SAVED_STEPS)


def exponential(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


RESUMED: dict[str, dict[str, Any]] = {
    "schedule_that_catches_up": {"restore": steps_up},
    "schedule_created_at_its_last_step": {"restore": lambda *_: None, "make": of_last_step},
    "schedule_of_another_kind": {"restore": lambda *_: None, "make": exponential},
    "schedule_that_had_not_begun": {"restore": lambda *_: None, "last": 0},
    "schedule_of_a_fine_tuning": {"restore": lambda *_: None, "loads_optimizer": False, "lr": 1e-4},
    "schedule_set_by_hand": {
        "restore": lambda schedule, state: setattr(schedule, "last_epoch", state["last_epoch"])
    },
}


def _resumed_control(name: str) -> None:
    def loop() -> None:
        resumed_with_a_schedule(**RESUMED[name])

    loop.__name__ = name
    control(loop)


for key in RESUMED:
    _resumed_control(key)


@fault(rule="not_restored", kind="part", severity="info", step=0, names="The state of GradScaler")
def scaler_not_restored(injected: bool) -> None:
    content, model, optimizer = resumed()
    content["scaler"] = torch.amp.GradScaler("cpu", init_scale=512.0).state_dict()
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    content = torch.load(file)
    optimizer.load_state_dict(content["optimizer"])
    loop = Loop(model, optimizer, has_scaler=True)
    if not injected:
        loop.init_scale = content["scaler"]["scale"]
    loop.run()
