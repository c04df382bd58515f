"""Training setups that backlight must neither change nor misread.

Each case trains a small model for a few steps and returns its final tensors. A case does not use backlight;
what a watched run must record of it is given as data.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_by_imported_name
from torch.nn.utils import clip_grad_value_ as clip_value_by_imported_name
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from zoo import NormedMlp, TiedEmbedding

STEPS = 4
NO_LOSS = ("loss and backward",)

Train = Callable[[], list[Tensor]]


def assert_equal(ones: list[Tensor], others: list[Tensor]) -> None:
    """Check that two runs ended with the same bits."""
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@dataclass(frozen=True)
class Case:
    """A training setup and what a watched run must record of it.

    ``unmeasured`` names parameters that are never measured, ``scalars`` are required, and ``gaps`` lists what
    the run reports as not measured.
    """

    name: str
    train: Train
    steps: int = STEPS
    unmeasured: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ("lr/0/0",)
    events: tuple[str, ...] = ()
    backwards: int = 1
    gaps: tuple[str, ...] = ()


CASES: dict[str, Case] = {}


def case(**expected: object) -> Callable[[Train], Train]:
    """Register a training setup under the name of its function."""

    def decorate(train: Train) -> Train:
        CASES[train.__name__] = Case(train.__name__, train, **expected)  # type: ignore[arg-type]
        return train

    return decorate


def batches(count: int, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(6, 4, generator=generator, device="cpu")
        y = torch.randint(0, 3, (6,), generator=generator, device="cpu")
        yield x.to(torch.get_default_device()), y.to(torch.get_default_device())


def build(make: Callable[[], nn.Module] = NormedMlp) -> nn.Module:
    torch.manual_seed(0)
    return make()


def ends(*models: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for m in models for t in m.state_dict().values() if isinstance(t, Tensor)]


def build_with_sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    before_step: Callable[[nn.Module], object] = lambda _model: None,
    steps: int = STEPS,
) -> list[Tensor]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before_step(model)
        optimizer.step()
    return ends(model)


@case(scalars=("lr/0/0", "loss", "total_norm"))
def plain() -> list[Tensor]:
    return loop(build())


@case()
def adamw_foreach() -> list[Tensor]:
    model = build()
    return loop(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True))


@case()
def adamw_fused() -> list[Tensor]:
    model = build()
    return loop(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))


@case(scalars=("lr/0/0", "lr/0/1"))
def parameter_groups() -> list[Tensor]:
    model = build()
    groups = [
        {"params": model.first.parameters(), "lr": 0.1},
        {"params": [*model.norm.parameters(), *model.last.parameters()]},
    ]
    return loop(model, torch.optim.SGD(groups, lr=0.01))


@case(scalars=("lr/0/0", "lr/1/0"))
def two_optimizers_one_backward() -> list[Tensor]:
    model = build()
    one = torch.optim.SGD([*model.first.parameters(), *model.norm.parameters()], lr=0.1)
    two = torch.optim.Adam(model.last.parameters(), lr=0.01)
    for x, y in batches(STEPS):
        one.zero_grad()
        two.zero_grad()
        F.cross_entropy(model(x), y).backward()
        one.step()
        two.step()
    return ends(model)


@case(steps=2 * STEPS, scalars=("lr/0/0", "lr/1/0"))
def adversarial() -> list[Tensor]:
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2)
    for x, _ in batches(STEPS):
        fake = generator(x[:, :2])
        critic_optimizer.zero_grad()
        (critic(fake.detach()).mean() - critic(x).mean()).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        (-critic(fake).mean()).backward()
        generator_optimizer.step()
    return ends(generator, critic)


@case(steps=2, backwards=2)
def accumulation() -> list[Tensor]:
    model, optimizer = build_with_sgd()
    for number, (x, y) in enumerate(batches(4)):
        (F.cross_entropy(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return ends(model)


@case(scalars=("clip/norm", "clip/limit", "clip/factor"))
def clipped_by_norm() -> list[Tensor]:
    return loop(build(), before_step=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))


@case(scalars=("clip/norm", "clip/limit", "clip/factor"))
def clipped_by_imported_name() -> list[Tensor]:
    return loop(build(), before_step=lambda m: clip_by_imported_name(m.parameters(), 0.1))


@case(scalars=("clip/norm", "clip/limit", "clip/factor"))
def clipped_in_two_halves() -> list[Tensor]:
    def clip(model: nn.Module) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)

    return loop(build(), before_step=clip)


@case(scalars=("clip/limit",))
def clipped_by_value() -> list[Tensor]:
    return loop(build(), before_step=lambda m: clip_value_by_imported_name(m.parameters(), 0.01))


@case(scalars=("clip/by_hand",), events=("clip_by_hand",))
def clipped_by_hand() -> list[Tensor]:
    def clip(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.clamp_(-0.01, 0.01)

    return loop(build(), before_step=clip)


def scaled(
    make: Callable[..., torch.optim.Optimizer], *, clip: bool = False, overflow_at: int = -1
) -> list[Tensor]:
    model = build()
    optimizer = make(model.parameters())
    device = torch.get_default_device().type
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for number, (x, y) in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        if number == overflow_at:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return ends(model)


SGD = partial(torch.optim.SGD, lr=0.1)
FUSED = partial(torch.optim.AdamW, lr=1e-2, fused=True)
SCALED = ("loss", "scaler/scale", "scaler/skipped")


for _name, _train, _expected in (
    ("scaler", partial(scaled, SGD), {}),
    ("scaler_with_clipping", partial(scaled, SGD, clip=True), {"scalars": (*SCALED, "clip/norm")}),
    ("scaler_with_fused", partial(scaled, FUSED), {}),
    ("scaler_skips", partial(scaled, SGD, overflow_at=1), {"events": ("scaler_skip",)}),
    ("scaler_skips_with_fused", partial(scaled, FUSED, overflow_at=1), {"events": ("scaler_skip",)}),
):
    CASES[_name] = Case(_name, _train, **{"scalars": SCALED, **_expected})


def closure_loop(make: Callable[..., torch.optim.Optimizer], *, by_keyword: bool) -> list[Tensor]:
    model = build()
    optimizer = make(model.parameters())
    for x, y in batches(STEPS):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
    return ends(model)


@case(backwards=3)
def lbfgs() -> list[Tensor]:
    return closure_loop(partial(torch.optim.LBFGS, lr=0.1, max_iter=3), by_keyword=False)


@case()
def closure_by_keyword() -> list[Tensor]:
    return closure_loop(partial(torch.optim.Adam, lr=1e-2), by_keyword=True)


@case()
def tied() -> list[Tensor]:
    return loop(build(TiedEmbedding))


@case(unmeasured=("first.weight", "first.bias"))
def frozen() -> list[Tensor]:
    model = build()
    model.first.requires_grad_(False)
    return loop(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


class WithSpare(NormedMlp):
    """Model with a layer that ``forward`` never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


@case(unmeasured=("spare.weight", "spare.bias"), events=("no_grad_at_step",))
def unused() -> list[Tensor]:
    return loop(build(WithSpare))


@case()
def group_added() -> list[Tensor]:
    model = build()
    optimizer = torch.optim.SGD([*model.norm.parameters(), *model.last.parameters()], lr=0.1)
    for number, (x, y) in enumerate(batches(STEPS)):
        if number == 2:
            optimizer.add_param_group({"params": model.first.parameters(), "lr": 0.01})
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return ends(model)


@case(events=("parameters_changed",))
def head_replaced() -> list[Tensor]:
    model, optimizer = build_with_sgd()
    for number, (x, y) in enumerate(batches(STEPS)):
        if number == 2:
            model.last = nn.Linear(8, 5)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return ends(model)


@case()
def sparse() -> list[Tensor]:
    torch.manual_seed(0)
    table, head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3)
    one, two = torch.optim.SparseAdam(table.parameters(), lr=0.01), torch.optim.SGD(head.parameters(), lr=0.1)
    for x, y in batches(STEPS):
        one.zero_grad()
        two.zero_grad()
        F.cross_entropy(head(table((x[:, 0].abs() * 9).long().clamp(max=19))), y).backward()
        one.step()
        two.step()
    return ends(table, head)


class Transposing(nn.Module):
    """Model whose weight gradient is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@case()
def non_contiguous() -> list[Tensor]:
    return loop(build(Transposing))


class ComplexNet(nn.Module):
    """Model with one complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


@case()
def complex_weights() -> list[Tensor]:
    return loop(build(ComplexNet))


def typed(dtype: torch.dtype) -> list[Tensor]:
    model = build().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(dtype)).float(), y).backward()
        optimizer.step()
    return ends(model)


for _dtype in ("bfloat16", "float16", "float64"):
    CASES[f"{_dtype}_weights"] = Case(f"{_dtype}_weights", partial(typed, getattr(torch, _dtype)))


@case()
def compiled() -> list[Tensor]:
    torch._dynamo.reset()
    return loop(torch.compile(build(), backend="aot_eager"))


class Checkpointed(NormedMlp):
    """Model that recomputes its body in backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self._body, self.first(x), use_reentrant=self.reentrant)
        return self.last(hidden)

    def _body(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.norm(x)), 0.1)


class CheckpointedReentrant(Checkpointed):
    """Model that recomputes with a backward inside backward."""

    reentrant = True


@case()
def checkpointing() -> list[Tensor]:
    return loop(build(Checkpointed))


@case()
def checkpointing_reentrant() -> list[Tensor]:
    return loop(build(CheckpointedReentrant))


@case()
def exception_in_the_middle() -> list[Tensor]:
    model, optimizer = build_with_sgd()
    for number, (x, y) in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        try:
            if number == 1:
                F.cross_entropy(model(x), y).backward()
                raise ArithmeticError("in the middle")
        except ArithmeticError:
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return ends(model)


class Failing(torch.autograd.Function):
    """Operation that raises in backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


@case()
def exception_in_backward() -> list[Tensor]:
    model, optimizer = build_with_sgd()
    for number, (x, y) in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        if number == 1:
            try:
                Failing.apply(F.cross_entropy(model(x), y)).backward()
            except ArithmeticError:
                optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return ends(model)


@case(scalars=("batch", "loss"))
def forked_workers() -> list[Tensor]:
    model, optimizer = build_with_sgd()
    inputs = torch.cat([x for x, _ in batches(STEPS)])
    targets = torch.cat([y for _, y in batches(STEPS)])
    for x, y in DataLoader(
        TensorDataset(inputs, targets), batch_size=6, num_workers=1, multiprocessing_context="fork"
    ):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return ends(model)


@case(scalars=("loss",))
def optimizer_in_backward() -> list[Tensor]:
    model = build()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for x, y in batches(STEPS):
        F.cross_entropy(model(x), y).backward()
    return ends(model)


@case()
def copied_and_saved() -> list[Tensor]:
    model, optimizer = build_with_sgd()
    control = model
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        control = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
    return ends(model, control)


class EditsItsOutput(NormedMlp):
    """Model whose output the caller edits in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clone()


@case()
def in_place_edit_of_output() -> list[Tensor]:
    model = build(EditsItsOutput)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        logits = model(x)
        logits += 1.0
        logits[:, 0].mul_(2.0)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
    return ends(model)


@case()
def saved_tensor_hooks() -> list[Tensor]:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return loop(build())


@case(backwards=0, gaps=NO_LOSS)
def functional_gradients() -> list[Tensor]:
    model, optimizer = build_with_sgd()
    names = [name for name, _ in model.named_parameters()]

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    for x, y in batches(STEPS):
        grads = torch.func.grad(loss)({n: p.detach() for n, p in model.named_parameters()}, x, y)
        for name, parameter in zip(names, model.parameters(), strict=True):
            parameter.grad = grads[name]
        optimizer.step()
    return ends(model)


@case(backwards=0, gaps=NO_LOSS)
def gradients_by_grad() -> list[Tensor]:
    model, optimizer = build_with_sgd()
    for x, y in batches(STEPS):
        found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        for parameter, grad in zip(model.parameters(), found, strict=True):
            parameter.grad = grad
        optimizer.step()
    return ends(model)


CASE_NAMES = [
    name if index % 4 == 0 else pytest.param(name, marks=pytest.mark.full) for index, name in enumerate(CASES)
]
"""Names of all cases as test parameters; the default run takes every fourth."""
