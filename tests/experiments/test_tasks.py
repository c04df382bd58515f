"""Every experiment: registered, documented, trains, resumes exactly, and is unchanged by evaluation."""

from __future__ import annotations

import copy
import dataclasses
import inspect

import pytest
import torch

from backlight.experiments import oracle
from backlight.experiments.data.algorithmic import NO_TOKEN
from backlight.experiments.experiment import EXPERIMENTS
from backlight.experiments.models.transformer import Decoder, Gpt
from backlight.experiments.published import doshi, levi, minegishi, nanda, power, thilak, wang
from backlight.experiments.tasks.tickets import magnitude_masks, shuffled_masks
from backlight.monitors.grokking.model.verdicts import GrokkingVerdict

pytest.importorskip("sklearn")

CPU = torch.device("cpu")
NAMES = ["doshi", "humayun", "levi", "liu", "minegishi", "nanda", "omnigrok", "power", "thilak", "wang"]
ARXIV = {
    "power": "2201.02177",
    "liu": "2205.10343",
    "nanda": "2301.05217",
    "wang": "2405.15071",
    "omnigrok": "2210.01117",
    "humayun": "2402.15555",
    "thilak": "2206.04817",
    "doshi": "2406.03495",
    "levi": "2310.16441",
    "minegishi": "2310.19470",
}


def count(model):
    return sum(p.numel() for p in model.parameters())


def ci(name, seed=0, control="", **training):
    """Build the ci preset, with the two phases of minegishi meeting at step 6."""
    experiment = EXPERIMENTS[name]
    settings = experiment.ci
    if name == "minegishi":
        training.setdefault("dense_steps", 6)
    if training:
        settings = dataclasses.replace(settings, training=dataclasses.replace(settings.training, **training))
    return experiment.build(settings, seed, CPU, control)


def train(task, start, stop):
    losses = []
    for step in range(start, stop):
        task.before_step(step)
        task.optimizer.zero_grad(set_to_none=True)
        loss = task.loss(task.model, task.batch(step))
        loss.backward()
        task.optimizer.step()
        if task.scheduler is not None:
            task.scheduler.step()
        losses.append(loss.item())
    return losses


def state(task):
    return copy.deepcopy(
        {
            "model": task.model.state_dict(),
            "optimizer": task.optimizer.state_dict(),
            "scheduler": None if task.scheduler is None else task.scheduler.state_dict(),
            "extra": task.extra_state(),
        }
    )


def gradient_norm(model):
    return float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())


def test_ten_experiments_are_registered():
    assert list(EXPERIMENTS) == NAMES
    for name, experiment in EXPERIMENTS.items():
        assert experiment.name == name
        assert experiment.paper.arxiv == ARXIV[name]
        assert experiment.paper.claim
        assert experiment.paper.unclear
        assert experiment.effect
        # A claim that is no verdict has "" for the paper; a run of the preset always has a verdict.
        assert experiment.expects == "" or GrokkingVerdict(experiment.expects)
        assert GrokkingVerdict(experiment.ci_expects)


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_frozen_documented_sections(name):
    experiment = EXPERIMENTS[name]
    settings = experiment.settings
    assert type(experiment.ci) is type(experiment.settings)
    for section in ("data", "model", "training"):
        part = getattr(settings, section)
        assert dataclasses.is_dataclass(part)
        # A dataclass without a docstring gets its signature as one.
        assert not inspect.getdoc(type(part)).startswith(type(part).__name__ + "(")
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.__setattr__(dataclasses.fields(part)[0].name, 1)
    for field in ("steps", "log_every", "thorough_every"):
        assert getattr(settings.training, field) > 0
        assert getattr(experiment.ci.training, field) > 0
    assert experiment.ci.training.steps < settings.training.steps or name in {"liu", "oracle"}


def test_parameters_of_the_published_models():
    assert count(EXPERIMENTS["power"].build(power.PUBLISHED, 0, CPU, "").model) == 455_424
    assert count(EXPERIMENTS["nanda"].build(nanda.PUBLISHED, 0, CPU, "").model) == 226_816
    assert count(EXPERIMENTS["wang"].build(wang.CI, 0, CPU, "").model) == 107_328
    assert count(oracle.build().model) == 8_832


@pytest.mark.parametrize(
    "settings", [dataclasses.replace(wang.PUBLISHED, model=wang.Model(layers=1)), wang.CI]
)
def test_wang_is_optimized_as_in_the_released_code(settings):
    task = EXPERIMENTS["wang"].build(
        dataclasses.replace(settings, training=dataclasses.replace(settings.training, clip=1e-9)), 0, CPU, ""
    )
    matrices, vectors = task.optimizer.param_groups
    assert matrices["weight_decay"] == settings.training.weight_decay
    assert vectors["weight_decay"] == 0
    named = {id(p): name for name, p in task.model.named_parameters()}
    assert {named[id(p)] for p in vectors["params"]} == {
        name for name in named.values() if name.endswith("bias") or "norm" in name
    }
    assert settings.training.clip == 1
    train(task, 0, 1)
    norm = torch.nn.utils.get_total_norm([p.grad for p in task.model.parameters()])
    assert float(norm) == pytest.approx(1e-9, rel=1e-2)


def test_power_clips_in_its_preset_and_not_as_published():
    published, preset = power.PUBLISHED.training, power.CI.training
    assert (published.clip, preset.clip) == (0.0, 3.0)
    experiment = EXPERIMENTS["power"]
    stepped = []
    for clip in (0.0, 1e-3):
        settings = dataclasses.replace(power.CI, training=dataclasses.replace(preset, clip=clip))
        task = experiment.build(settings, 0, CPU, "")
        task.loss(task.model, task.batch(0)).backward()
        before = gradient_norm(task.model)
        task.optimizer.step()
        stepped.append((before, gradient_norm(task.model)))
    (free, still_free), (as_free, clipped) = stepped
    assert free == as_free == still_free > 1e-2
    assert clipped == pytest.approx(1e-3, rel=1e-3)


def test_batches_of_the_preset_of_power_have_one_size():
    task = ci("power")
    sizes = [len(task.batch(step)[0]) for step in range(3)]
    assert sum(sizes) == len(task.split.train_inputs)
    assert max(sizes) - min(sizes) <= 1


def test_power_reads_permutations_in_the_authors_vocabulary():
    settings = dataclasses.replace(power.PUBLISHED, data=power.Data(operation="s5"))
    task = EXPERIMENTS["power"].build(settings, 0, CPU, "")
    assert task.facts.train_size + task.facts.test_size == 14_400
    assert task.facts.chance == 1 / 120
    assert task.split.train_labels.min() >= 97
    assert task.split.train_labels.max() < 217
    assert count(task.model) == 455_424
    small = dataclasses.replace(power.PUBLISHED, model=power.Model(vocabulary=50))
    with pytest.raises(ValueError, match=r"model.vocabulary is 50, expected at least 100"):
        EXPERIMENTS["power"].build(small, 0, CPU, "")


def test_a_last_block_at_the_answer_only_equals_the_whole_transformer():
    torch.manual_seed(0)
    decoder = Decoder(30, 5, layers=2, width=16, heads=4).double()
    tokens = torch.randint(30, (20, 5))
    whole = decoder.blocks(decoder.embed(tokens) + decoder.positions)
    torch.testing.assert_close(decoder(tokens), decoder.head(whole[:, -1]), rtol=1e-12, atol=1e-12)
    gpt = Gpt(30, 3, layers=2, width=16, heads=4).double()
    tokens = torch.randint(30, (20, 3))
    tokens[::3, 2] = NO_TOKEN
    whole = gpt.norm(gpt.blocks(gpt.embed(tokens.clamp(min=0)) + gpt.positions(torch.arange(3))))
    ends = (tokens != NO_TOKEN).sum(1) - 1
    expected = gpt.head(whole[torch.arange(20), ends])
    torch.testing.assert_close(gpt(tokens), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_few_steps_lower_the_loss_and_log_all_measures(name):
    task = ci(name)
    before = task.evaluate(thorough=True)
    train(task, 0, 6)
    after = task.evaluate(thorough=False)
    assert set(after) <= set(before)
    for values in (before, after):
        for key in ("train_loss", "test_loss", "train_accuracy", "test_accuracy"):
            assert key in values
        assert all(k.startswith("progress/") for k in values if "_loss" not in k and "_accuracy" not in k)
        assert 0 <= values["train_accuracy"] <= 1
    assert after["train_loss"] < before["train_loss"]
    assert any(key.startswith("progress/") for key in after)
    assert 0 <= task.facts.chance < 0.2
    assert task.facts.train_size == len(task.split.train_inputs)
    held = {id(p) for group in task.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in task.model.parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_losses_of_samples_add_up_to_that_of_the_batch(name):
    task = ci(name)
    batch = task.probe
    size = len(batch[0])
    whole = task.sample_loss(task.model, batch)
    assert float(whole.detach()) == pytest.approx(
        size * float(task.loss(task.model, batch).detach()), rel=1e-5
    )
    parts = sum(
        float(task.sample_loss(task.model, (batch[0][n : n + 1], batch[1][n : n + 1])).detach())
        for n in range(size)
    )
    assert float(whole.detach()) == pytest.approx(parts, rel=1e-4)
    inputs = task.inputs(batch)
    assert (inputs is not None) == batch[0].is_floating_point()


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_task_equals_an_uninterrupted_one(name):
    whole = ci(name)
    whole_losses = train(whole, 0, 10)
    first = ci(name)
    losses = train(first, 0, 7)
    kept = state(first)
    torch.manual_seed(99)
    second = ci(name)
    second.model.load_state_dict(kept["model"])
    second.optimizer.load_state_dict(kept["optimizer"])
    if second.scheduler is not None:
        second.scheduler.load_state_dict(kept["scheduler"])
    second.load_extra_state(kept["extra"])
    losses += train(second, 7, 10)
    assert losses == whole_losses
    for mine, true in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, true)
    assert second.evaluate(thorough=True) == whole.evaluate(thorough=True)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_changes_no_state(name):
    looked, alone = ci(name), ci(name)
    train(looked, 0, 2)
    train(alone, 0, 2)
    kept = state(looked)
    gradients = [p.grad.clone() for p in looked.model.parameters()]
    random = torch.get_rng_state()
    looked.model.train()
    looked.evaluate(thorough=True)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in looked.model.modules())
    assert all(torch.equal(p.grad, g) for p, g in zip(looked.model.parameters(), gradients, strict=True))
    for name_, value in looked.model.state_dict().items():
        assert torch.equal(value, kept["model"][name_])
    assert train(looked, 2, 5) == train(alone, 2, 5)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_depends_on_seed_and_step_only(name):
    task, again, other = ci(name), ci(name), ci(name, seed=1)
    later, sooner = task.batch(50), task.batch(3)
    for mine, true in zip(sooner, again.batch(3), strict=True):
        assert torch.equal(mine, true)
    for mine, true in zip(later, again.batch(50), strict=True):
        assert torch.equal(mine, true)
    assert not all(torch.equal(a, b) for a, b in zip(sooner, other.batch(3), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_control_differs_in_labels_only(name):
    task, control = ci(name), ci(name, control="random-labels")
    assert torch.equal(task.split.train_inputs, control.split.train_inputs)
    assert not torch.equal(task.split.train_labels, control.split.train_labels)
    assert not torch.equal(task.split.test_labels, control.split.test_labels)
    for mine, true in zip(control.model.parameters(), task.model.parameters(), strict=True):
        assert torch.equal(mine, true)
    with pytest.raises(ValueError, match="expected one of"):
        ci(name, control="other")


def test_an_epoch_contains_every_sample_once():
    task = ci("power")
    size, total = task.batch_size, task.facts.train_size
    steps = -(-total // size)
    for epoch in range(2):
        drawn = [tuple(row) for s in range(steps) for row in task.batch(epoch * steps + s)[0].tolist()]
        assert sorted(drawn) == sorted(map(tuple, task.split.train_inputs.tolist()))
    assert not torch.equal(task.batch(0)[0], task.batch(steps)[0])


def closed_form(difference, samples, lr, step):
    """Return D_t = D₀ (I - 2ηΣ/outputs)^t of Levi et al., by the eigenvalues of Σ = XᵀX/N, without a loop."""
    values, vectors = torch.linalg.eigh(samples.T @ samples / len(samples))
    factor = (1 - 2 * lr * values / len(difference)) ** step
    return difference @ (vectors * factor) @ vectors.T


def test_levi_follows_its_closed_form():
    settings = levi.Settings(
        model=levi.Model(),
        data=levi.Data(inputs=30, outputs=2, train_size=40, test_size=10),
        training=levi.Training(lr=0.2, tolerance=1e-3),
    )
    task = EXPERIMENTS["levi"].build(settings, 0, CPU, "")
    samples, targets = task.split.train_inputs, task.split.train_labels
    teacher = torch.linalg.lstsq(samples, targets).solution.T
    start = task.model.weight.detach() - teacher
    done = 0
    for step in (1, 10, 300):
        train(task, done, step)
        done = step
        reached = task.model.weight.detach() - teacher
        wanted = closed_form(start, samples, 0.2, step)
        assert float((reached - wanted).norm() / start.norm()) < 1e-10
        assert float(wanted.norm()) < float(start.norm())
    assert task.evaluate(thorough=False)["progress/distance_to_teacher"] == pytest.approx(
        float(reached.norm()), rel=1e-6
    )


def test_masks_take_the_smallest_weights_of_all():
    weights = {"a": torch.tensor([[3.0, -0.1], [0.2, -5.0]]), "b": torch.tensor([[0.3, 1.0]])}
    masks = magnitude_masks(weights, 0.5)
    assert masks["a"].tolist() == [[True, False], [False, True]]
    assert masks["b"].tolist() == [[False, True]]
    each = magnitude_masks(weights, 0.5, "matrix")
    assert each["a"].tolist() == masks["a"].tolist()
    assert each["b"].tolist() == [[False, True]]
    assert magnitude_masks(weights, 1 / 3, "matrix")["b"].tolist() == [[False, True]]
    assert magnitude_masks(weights, 1 / 3)["b"].tolist() == [[True, True]]
    random = shuffled_masks({"a": torch.arange(100).view(10, 10) < 30}, seed=0)
    assert random["a"].sum() == 30
    assert not torch.equal(random["a"], torch.arange(100).view(10, 10) < 30)


@pytest.mark.parametrize("mask", ["ticket", "random", "none"])
def test_a_ticket_is_pruned_rewound_and_stays_pruned(mask):
    task = ci("minegishi", mask=mask, dense_steps=4)
    start = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    train(task, 0, 4)
    dense = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    assert task.evaluate(thorough=False)["progress/phase"] == 0
    task.before_step(4)
    after = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    sparsity = 0.0 if mask == "none" else task.sparsity
    total = sum(p.numel() for p in after.values())
    gone = sum(int((p == 0).sum()) for p in after.values())
    assert gone == round(sparsity * total)
    for name, value in after.items():
        assert torch.equal(value[value != 0], start[name][value != 0])
    if mask == "ticket":
        kept = torch.cat([dense[n][after[n] != 0].abs() for n in after])
        lost = torch.cat([dense[n][after[n] == 0].abs() for n in after])
        assert kept.min() >= lost.max()
    assert not task.optimizer.state
    train(task, 4, 8)
    for name, parameter in task.model.named_parameters():
        assert (parameter[after[name] == 0] == 0).all()
        assert not torch.equal(parameter, after[name])
    values = task.evaluate(thorough=False)
    assert values["progress/phase"] == 1
    assert values["progress/sparsity"] == pytest.approx(sparsity, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "section", "field", "value", "text"),
    [
        ("thilak", "model", "kind", "cnn", "model.kind is 'cnn', expected 'decoder' or 'pairs'"),
        ("humayun", "training", "loss", "hinge", "training.loss is 'hinge', expected one of"),
        ("humayun", "model", "activation", "sin", "model.activation is 'sin', expected one of"),
        ("minegishi", "training", "mask", "snip", "training.mask is 'snip', expected one of ticket"),
        ("minegishi", "training", "scope", "layer", "training.scope is 'layer', expected one of all"),
        ("power", "model", "heads", 7, "7 heads do not divide a width of"),
        ("nanda", "data", "train_share", 1.0, "expected 1 to"),
        ("wang", "training", "clip", -1.0, "training.clip is -1.0, expected a norm above 0, or 0 for no"),
    ],
)
def test_impossible_settings_are_refused(name, section, field, value, text):
    experiment = EXPERIMENTS[name]
    part = dataclasses.replace(getattr(experiment.ci, section), **{field: value})
    with pytest.raises(ValueError, match=text):
        experiment.build(dataclasses.replace(experiment.ci, **{section: part}), 0, CPU, "")


def test_published_decoders_of_the_slingshot_build():
    task = EXPERIMENTS["thilak"].build(thilak.PUBLISHED, 0, CPU, "")
    assert task.facts.train_size == 4656
    assert isinstance(task.optimizer, torch.optim.Adam)
    assert task.optimizer.param_groups[0]["weight_decay"] == 0
    assert count(EXPERIMENTS["doshi"].build(doshi.PUBLISHED, 0, CPU, "").model) == 500 * 3 * 97
    published = EXPERIMENTS["minegishi"].build(minegishi.PUBLISHED, 0, CPU, "")
    assert count(published.model) == 2 * 67 * 500 + 2 * 500 * 48
