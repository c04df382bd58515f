"""Every experiment: registered, documented, trains, resumes exactly, and is unchanged by evaluation."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math

import pytest
import torch
from torch import nn

from backlight.experiments import config
from backlight.experiments.checkpoints import restore, training_state
from backlight.experiments.data.algorithmic import NO_TOKEN
from backlight.experiments.experiment import EXPERIMENTS, Setup
from backlight.experiments.models import Decoder, Gpt
from backlight.experiments.published import levi
from backlight.experiments.published.minegishi import magnitude_masks, shuffled_masks
from backlight.experiments.task import AdamWTraining, adamw, clip_gradients
from backlight.monitors.grokking.model.verdicts import GrokkingVerdict

pytest.importorskip("sklearn")

CPU = torch.device("cpu")
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
NAMES = sorted(ARXIV)
PARAMETERS = {
    "power": 455_424,
    "nanda": 226_816,
    "doshi": 500 * 3 * 97,
    "minegishi": 2 * 67 * 500 + 2 * 500 * 48,
}


def count(model):
    return sum(p.numel() for p in model.parameters())


def built(name, settings=None, seed=0, control=""):
    experiment = EXPERIMENTS[name]
    return experiment.build(settings or experiment.settings, seed, CPU, control)


def changed(settings, section, **values):
    """Return the settings with other values in one section."""
    part = dataclasses.replace(getattr(settings, section), **values)
    return dataclasses.replace(settings, **{section: part})


def ci(name, seed=0, control="", **training):
    """Build the ci preset, with the two phases of minegishi meeting at step 3, and a small graph of wang."""
    settings = EXPERIMENTS[name].ci
    if name == "minegishi":
        training.setdefault("dense_steps", 3)
    if name == "wang":
        settings = changed(settings, "data", entities=40)
    return built(name, changed(settings, "training", **training), seed, control)


def train(task, start, stop):
    losses = []
    for step in range(start, stop):
        task.before_step(step)
        losses.append(task.train_step(step).item())
    return losses


def gradient_norm(model):
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))


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


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_published_models(name):
    assert count(built(name).model) == PARAMETERS[name]


def test_models_of_presets():
    assert count(built("wang", EXPERIMENTS["wang"].ci).model) == 107_328
    assert count(config.build().model) == 8_832
    slingshot = built("thilak")
    assert len(slingshot.split.train_inputs) == 4656
    assert isinstance(slingshot.optimizer, torch.optim.Adam)
    assert slingshot.optimizer.param_groups[0]["weight_decay"] == 0


def test_wang_is_optimized_as_in_released_code():
    experiment = EXPERIMENTS["wang"]
    assert experiment.settings.training.clip == experiment.ci.training.clip == 1
    assert not experiment.settings.training.decay_vectors
    task = ci("wang", clip=1e-9)
    matrices, vectors = task.optimizer.param_groups
    assert matrices["weight_decay"] == experiment.ci.training.weight_decay
    assert vectors["weight_decay"] == 0
    named = {id(p): name for name, p in task.model.named_parameters()}
    assert {named[id(p)] for p in vectors["params"]} == {
        name for name in named.values() if name.endswith("bias") or "norm" in name
    }
    train(task, 0, 1)
    assert gradient_norm(task.model) == pytest.approx(1e-9, rel=1e-2)


@pytest.mark.slow
def test_power_clips_in_its_preset_and_not_as_published():
    experiment = EXPERIMENTS["power"]
    assert (experiment.settings.training.clip, experiment.ci.training.clip) == (0.0, 3.0)
    stepped = []
    for clip in (0.0, 1e-3):
        task = ci("power", clip=clip)
        before = []
        task.train_step(0, lambda task=task, before=before: before.append(gradient_norm(task.model)))
        stepped.append((*before, gradient_norm(task.model)))
    (free, still_free), (as_free, clipped) = stepped
    assert free == as_free == still_free > 1e-2
    assert clipped == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("decay_vectors", [True, False])
def test_vectors_decay_unless_excluded(decay_vectors):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    nn.init.normal_(model[0].bias)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model, AdamWTraining(lr=0.1, weight_decay=0.5, decay_vectors=decay_vectors))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        decays = decay_vectors or parameter.ndim > 1
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if decays else 1.0))


@pytest.mark.parametrize(("limit", "expected"), [(0.0, 5.0), (2.0, 2.0), (7.0, 5.0)])
def test_gradients_are_clipped_to_norm(limit, expected):
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:]}], lr=1.0)
    clip_gradients(optimizer, weights, limit)
    weights[0].grad, weights[1].grad = torch.tensor([3.0]), torch.tensor([0.0, 4.0])
    optimizer.step()
    taken = torch.cat([w.detach() for w in weights])
    assert float(taken.norm()) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(taken / taken.norm(), torch.tensor([-0.6, 0.0, -0.8]), rtol=1e-5, atol=0)


def test_batches_of_preset_of_power_have_one_size_and_make_epoch():
    task = ci("power")
    inputs = task.split.train_inputs
    steps = -(-len(inputs) // task.batch_size)
    sizes = [len(task.batch(step)[0]) for step in range(steps)]
    assert max(sizes) - min(sizes) <= 1
    for epoch in range(2):
        drawn = [tuple(row) for s in range(steps) for row in task.batch(epoch * steps + s)[0].tolist()]
        assert sorted(drawn) == sorted(map(tuple, inputs.tolist()))
    assert not torch.equal(task.batch(0)[0], task.batch(steps)[0])


def test_power_reads_permutations_in_authors_vocabulary():
    published = EXPERIMENTS["power"].settings
    task = built("power", changed(published, "data", operation="s5"))
    assert len(task.split.train_inputs) + len(task.split.test_inputs) == 14_400
    assert task.chance == 1 / 120
    assert task.split.train_labels.min() >= 97
    assert task.split.train_labels.max() < 217
    assert count(task.model) == PARAMETERS["power"]
    with pytest.raises(ValueError, match=r"model.vocabulary is 50, expected at least 100"):
        built("power", changed(published, "model", vocabulary=50))


def test_last_block_at_answer_only_equals_whole_transformer():
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


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_evaluation_logs_all_measures_and_changes_no_state(name):
    evaluated, alone = ci(name), ci(name)
    before = evaluated.evaluate(thorough=True)
    train(evaluated, 0, 2)
    train(alone, 0, 2)
    kept = copy.deepcopy(evaluated.model.state_dict())
    gradients = [p.grad.clone() for p in evaluated.model.parameters()]
    random = torch.get_rng_state()
    evaluated.model.train()
    evaluated.evaluate(thorough=True)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in evaluated.model.modules())
    assert all(torch.equal(p.grad, g) for p, g in zip(evaluated.model.parameters(), gradients, strict=True))
    for key, value in evaluated.model.state_dict().items():
        assert torch.equal(value, kept[key])
    assert train(evaluated, 2, 6) == train(alone, 2, 6)
    after = evaluated.evaluate(thorough=False)
    assert set(after) <= set(before)
    for values in (before, after):
        assert {"train_loss", "test_loss", "train_accuracy", "test_accuracy"} <= set(values)
        assert all(k.startswith("progress/") for k in values if "_loss" not in k and "_accuracy" not in k)
        assert 0 <= values["train_accuracy"] <= 1
    assert after["train_loss"] < before["train_loss"]
    assert any(key.startswith("progress/") for key in after)
    assert 0 <= evaluated.chance < 0.2
    held = {id(p) for group in evaluated.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in evaluated.model.parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_losses_of_samples_add_up_to_that_of_batch(name):
    task = ci(name)
    inputs, labels = (part[:16] for part in task.probe)
    with torch.no_grad():
        whole = float(task.sample_loss(task.model, (inputs, labels)))
        assert whole == pytest.approx(16 * float(task.loss(task.model, (inputs, labels))), rel=1e-5)
        parts = sum(
            float(task.sample_loss(task.model, (inputs[n : n + 1], labels[n : n + 1]))) for n in range(16)
        )
    assert whole == pytest.approx(parts, rel=1e-4)
    assert (task.inputs(task.probe) is not None) == inputs.is_floating_point()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_resumed_task_equals_uninterrupted_one(name):
    whole, first = ci(name), ci(name)
    whole_losses = train(whole, 0, 6)
    losses = train(first, 0, 4)
    kept = copy.deepcopy(training_state(first))
    torch.manual_seed(99)
    second = ci(name)
    restore(second, kept)
    losses += train(second, 4, 6)
    assert losses == whole_losses
    for resumed, expected in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(resumed, expected)
    assert second.evaluate(thorough=True) == whole.evaluate(thorough=True)


@pytest.mark.parametrize("name", NAMES)
def test_batch_depends_on_seed_and_step_and_control_differs_in_labels_only(name):
    task, control, other = ci(name), ci(name, control="random-labels"), ci(name, seed=1)
    later, sooner = task.batch(50), task.batch(3)
    again = ci(name)
    for drawn, step in ((sooner, 3), (later, 50)):
        assert all(map(torch.equal, drawn, again.batch(step)))
    assert not all(map(torch.equal, sooner, other.batch(3)))
    assert torch.equal(task.split.train_inputs, control.split.train_inputs)
    assert not torch.equal(task.split.train_labels, control.split.train_labels)
    assert not torch.equal(task.split.test_labels, control.split.test_labels)
    assert all(map(torch.equal, control.model.parameters(), task.model.parameters()))


def closed_form(difference, samples, lr, step):
    """Return D_t = D₀ (I - 2ηΣ/outputs)^t of Levi et al., by the eigenvalues of Σ = XᵀX/N, without a loop."""
    values, vectors = torch.linalg.eigh(samples.T @ samples / len(samples))
    factor = (1 - 2 * lr * values / len(difference)) ** step
    return difference @ (vectors * factor) @ vectors.T


@pytest.mark.slow
def test_levi_follows_its_closed_form():
    data = levi.Data(inputs=30, outputs=2, train_size=40, test_size=10)
    task = built("levi", Setup(data, levi.Model(), levi.Training(lr=0.2, tolerance=1e-3)))
    samples, targets = task.split.train_inputs, task.split.train_labels
    teacher = torch.linalg.lstsq(samples, targets).solution.T
    start = task.model.weight.detach() - teacher
    done = 0
    for step in (1, 10, 300):
        train(task, done, step)
        done = step
        reached = task.model.weight.detach() - teacher
        expected = closed_form(start, samples, 0.2, step)
        assert float((reached - expected).norm() / start.norm()) < 1e-10
        assert float(expected.norm()) < float(start.norm())
    assert task.evaluate(thorough=False)["progress/distance_to_teacher"] == pytest.approx(
        float(reached.norm()), rel=1e-6
    )


def test_masks_take_smallest_weights_of_all():
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
def test_ticket_is_pruned_rewound_and_stays_pruned(mask):
    task = ci("minegishi", mask=mask, dense_steps=4)
    start = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    train(task, 0, 4)
    dense = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    assert task.evaluate(thorough=False)["progress/phase"] == 0
    task.before_step(4)
    after = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    sparsity = 0.0 if mask == "none" else task.sparsity
    total = sum(p.numel() for p in after.values())
    pruned = sum(int((p == 0).sum()) for p in after.values())
    assert pruned == round(sparsity * total)
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
        *(
            ("wang", "training", "clip", norm, "training.clip is .*, expected a norm above 0, or 0 for no")
            for norm in (-1.0, math.inf, math.nan)
        ),
    ],
)
def test_impossible_settings_are_refused(name, section, field, value, text):
    with pytest.raises(ValueError, match=text):
        built(name, changed(EXPERIMENTS[name].ci, section, **{field: value}))
