"""Networks with optimizers of their own have losses of their own, and rules compare none with another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

import backlight
from backlight.findings.evaluate import evaluate_rules
from backlight.findings.losses import losses_of, sole_loss
from backlight.monitors.health.monitor import UPDATE_SPACING
from backlight.monitors.health.panels.whole_model import loss as loss_panel
from backlight.report.panel import Drawn
from backlight.report.source import Source

pytestmark = pytest.mark.slow

ROUNDS = 60


class Generator(nn.Sequential):
    """What makes samples."""


class Discriminator(nn.Sequential):
    """What tells them from real ones."""


class Gan:
    """Two networks; ``logged`` is what the script would print of each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = Generator(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.discriminator = Discriminator(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=1e-3)
        self.of_discriminator = torch.optim.Adam(self.discriminator.parameters(), lr=1e-3)
        self.logged: dict[str, list[float]] = defaultdict(list)

    def fake(self) -> Tensor:
        return self.generator(torch.randn(8, 4))

    def loss(self, samples: Tensor, label: float) -> Tensor:
        return binary_cross_entropy_with_logits(self.discriminator(samples), torch.full((8, 1), label))

    def log(self, **losses: float) -> None:
        for name, value in losses.items():
            self.logged[f"loss of {name}"].append(value)


def in_turn(gan: Gan) -> None:
    gan.of_discriminator.zero_grad()
    loss = gan.loss(torch.randn(8, 2) + 3, 1.0) + gan.loss(gan.fake().detach(), 0.0)
    loss.backward()
    gan.of_discriminator.step()
    gan.of_generator.zero_grad()
    other = gan.loss(gan.fake(), 1.0)
    other.backward()  # reaches the discriminator as well
    gan.of_generator.step()
    gan.log(Discriminator=loss.item(), Generator=other.item())


def in_parts(gan: Gan) -> None:
    gan.of_discriminator.zero_grad()
    fake = gan.fake()
    parts = [gan.loss(torch.randn(8, 2) + 3, 1.0), gan.loss(fake.detach(), 0.0)]
    for part in parts:
        part.backward()
    gan.of_discriminator.step()
    gan.discriminator.requires_grad_(False)
    gan.of_generator.zero_grad()
    other = gan.loss(fake, 1.0)
    other.backward()
    gan.of_generator.step()
    gan.discriminator.requires_grad_(True)
    gan.log(Discriminator=sum(part.item() for part in parts), Generator=other.item())


def together(gan: Gan, *, to_none: bool = True) -> None:
    gan.of_generator.zero_grad()
    fake = gan.fake()
    other = gan.loss(fake, 1.0)
    other.backward(retain_graph=True)
    gan.of_discriminator.zero_grad(set_to_none=to_none)  # what the generator's loss left there
    loss = gan.loss(torch.randn(8, 2) + 3, 1.0) + gan.loss(fake.detach(), 0.0)
    loss.backward()
    gan.of_generator.step()
    gan.of_discriminator.step()
    gan.log(Discriminator=loss.item(), Generator=other.item())


def together_zeroed(gan: Gan) -> None:
    together(gan, to_none=False)


def train(gan: Gan, way: Callable[[Gan], None], run: Path, every: int) -> backlight.Run:
    models, optimizers = [gan.generator, gan.discriminator], [gan.of_generator, gan.of_discriminator]
    with backlight.watch(models, optimizers, run=run, every=every, summary=False):
        for _ in range(ROUNDS):
            way(gan)
    return backlight.open_run(run)


@pytest.mark.parametrize("every", [1, 10**6], ids=["recorded", "not_recorded"])
@pytest.mark.parametrize("way", [in_turn, in_parts, together, together_zeroed])
def test_each_network_has_the_loss_that_the_script_logs(
    way: Callable[[Gan], None], every: int, tmp_path: Path
) -> None:
    gan = Gan()
    run = train(gan, way, tmp_path / "run", every)
    losses = losses_of(run)
    assert losses.keys() == gan.logged.keys()
    for label, logged in gan.logged.items():
        np.testing.assert_allclose(losses[label].values, logged, rtol=1e-5)
    assert not len(sole_loss(run).steps)


def test_page_draws_a_curve_of_each_network(tmp_path: Path) -> None:
    gan = Gan()
    run = train(gan, in_turn, tmp_path / "run", 1)
    drawn = loss_panel(Source(run))
    assert isinstance(drawn, Drawn)
    (chart,) = drawn.data["charts"]
    assert sorted(line["label"] for line in chart["lines"]) == sorted(gan.logged)
    assert all(not len(line["sampled"]) and not len(line["breaks"]) for line in chart["lines"])


@pytest.mark.parametrize("separate", [True, False])
def test_loss_of_two_optimizers_is_one_where_they_share_it(separate: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in model]
    logged = []
    with backlight.watch(model, optimizers, run=tmp_path / "run", summary=False):
        for _ in range(ROUNDS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            hidden = model[0](torch.randn(8, 4))
            if separate:
                hidden.square().mean().backward()
                hidden = hidden.detach()
            loss = mse_loss(model[1](hidden), torch.ones(8, 1))
            loss.backward()
            logged.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
    losses = losses_of(backlight.open_run(tmp_path / "run"))
    assert [*losses] == (["loss of 0", "loss of 1"] if separate else ["loss"])
    assert np.allclose(losses["loss of 1" if separate else "loss"].values, logged)


@pytest.mark.parametrize("several", [True, False])
def test_losses_of_networks_that_oppose_each_other_need_not_fall(several: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in models]
    used = 2 if several else 1
    with backlight.watch(models[:used], optimizers[:used], run=tmp_path / "run", every=1, summary=False):
        for step in range(400):
            for model, optimizer in zip(models[:used], optimizers[:used], strict=True):
                optimizer.zero_grad()
                (model(torch.ones(8, 4)).square().mean() + 1 + step / 100).backward()
                optimizer.step()
    rules = [finding.rule for finding in evaluate_rules(backlight.open_run(tmp_path / "run"))]
    assert ("loss_not_falling" in rules) is not several


@pytest.mark.parametrize("way", [in_turn, together])
def test_updates_of_each_network_are_measured(way: Callable[[Gan], None], tmp_path: Path) -> None:
    run = train(Gan(), way, tmp_path / "run", 1)
    updates = run.frame("update", "ratio")
    measured = np.isfinite(updates.values).sum(axis=0)
    assert (measured == ROUNDS / UPDATE_SPACING).all(), dict(zip(updates.names, measured, strict=True))


def with_a_critic(gan: Gan) -> None:
    """Train the discriminator four times for each step of the generator, as of a WGAN."""
    for _ in range(4):
        gan.of_discriminator.zero_grad()
        gan.loss(torch.randn(8, 2) + 3, 1.0).backward()
        gan.of_discriminator.step()
    gan.of_generator.zero_grad()
    gan.loss(gan.fake(), 1.0).backward()
    gan.of_generator.step()


@pytest.mark.parametrize(("way", "turns"), [(in_turn, 2), (with_a_critic, 5), (together, 1)])
@pytest.mark.parametrize("every", [2, 4, 5])
def test_a_round_of_optimizers_is_recorded_whole(
    way: Callable[[Gan], None], turns: int, every: int, tmp_path: Path
) -> None:
    """Every second step of a GAN would show one of its networks only, for ever."""
    run = train(Gan(), way, tmp_path / "run", every)
    recorded = set(run.series_steps("gradient").tolist())
    known = range(2 * turns, ROUNDS * turns - turns)  # the first rounds tell how long one is
    assert recorded & {*known} == {step for step in known if step // turns % every == 0}
    measured = run.frame("update", "ratio").measured.any(axis=0)
    assert measured.all()
