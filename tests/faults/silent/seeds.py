"""Seeds of the global generator that are set between steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from faults.silent.loop import Loop, control, fault, perceptron

EPOCHS = 4


def sampling(sample: Callable[[int], object], before: Callable[[], object] = lambda: None) -> None:
    """Train for some epochs of 6 steps with noise, and take samples after each."""
    before()
    loop = Loop(perceptron(), steps=6, epochs=EPOCHS)
    loop.loss_of = lambda out, y: torch.nn.functional.cross_entropy(out + 0.1 * torch.randn_like(out), y)
    loop.after_epoch = sample
    loop.run()


def noise(generator: torch.Generator | None = None) -> Tensor:
    return torch.randn(4, 4, generator=generator)


@fault(rule="repeated_data", kind="seeded", severity="warning", step=12, names="torch.manual_seed(0)")
def samples_of_the_global_generator(injected: bool) -> None:
    generator = torch.Generator()

    def sample(_: int) -> None:
        noise((torch if injected else generator).manual_seed(0))  # type: ignore[attr-defined]

    sampling(sample)


def in_a_fork(_: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        noise()


def with_the_state_restored(_: int) -> None:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    noise()
    torch.set_rng_state(state)


def seeded_once(epoch: int) -> None:
    """When a second stage of the training run begins."""
    if epoch == 1:
        torch.manual_seed(0)


def after_the_last_step(epoch: int) -> None:
    if epoch == EPOCHS - 1:
        for _ in range(3):
            torch.manual_seed(0)
            noise()


def before_the_first_step() -> None:
    for _ in range(3):
        torch.manual_seed(0)


SAMPLES: dict[str, Callable[[int], object]] = {
    "samples_in_a_fork": in_a_fork,
    "samples_with_the_state_restored": with_the_state_restored,
    "second_stage_with_a_seed": seeded_once,
    "samples_after_the_last_step": after_the_last_step,
    "seed_of_the_epoch": torch.manual_seed,
    "samples_of_another_generator": lambda _: noise(torch.Generator().manual_seed(0)),
    "fresh_seed": lambda _: torch.seed(),
}


def _control(name: str, sample: Callable[[int], object], before: Callable[[], object]) -> None:
    def loop() -> None:
        sampling(sample, before)

    loop.__name__ = name
    control(loop)


for key, function in SAMPLES.items():
    _control(key, function, lambda: None)
_control("seeds_before_the_first_step", lambda _: None, before_the_first_step)
