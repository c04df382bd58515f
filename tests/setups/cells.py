"""The cells of the matrix: each monitor in each training setup against reference values.

A check trains unwatched for the reference, trains watched, and compares. It returns an :class:`Outcome`
whose reason is the one that was reported; a wrong number is an ``AssertionError``.
"""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import OptimizedModule

import backlight
from backlight.measure.spectra.measurement import SpectralEcho, spectral_echo
from backlight.store import spectra as stored
from backlight.store.read.run import Run
from faults.injection import wait_for_watchdog
from setups import training_setups
from setups.ranks import gathered, rank, together, wait
from setups.training_setups import (
    CLASSES,
    FEATURES,
    MATRICES,
    NAMES,
    OTHERS,
    SETUPS,
    STEPS,
    Batch,
    Pauses,
    Setup,
)

TESTED, IN_PART, REFUSED = "tested", "in part", "refused"

SLEEP = 4.0
STALL = 1.0
PROBE = 5
"""Samples of the probe batch."""


@dataclass(frozen=True)
class Outcome:
    """The result of a cell: a word, and the reasons for unmeasured data."""

    word: str
    reason: str = ""


@contextlib.contextmanager
def watched(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, monitors: str, **settings: Any
) -> Iterator[list[str]]:
    """Watch, and collect the warnings of backlight; other warnings are errors."""
    messages: list[str] = []
    wait()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with backlight.watch(model, optimizer, run=path, monitors=monitors, **settings):
            yield messages
    messages.extend(str(w.message) for w in caught if "backlight" in str(w.message))
    wait()


def unmeasured(run: Run) -> list[str]:
    """Return the distinct reasons for unmeasured data."""
    return list(dict.fromkeys(str(e.payload["reason"]) for e in run.events("unmeasured")))


def assert_nothing_missing(run: Run, messages: list[str]) -> None:
    """Assert that no data was reported missing."""
    of_all_ranks = gathered(messages)
    assert not unmeasured(run), unmeasured(run)
    assert not any(of_all_ranks), of_all_ranks


# health


def reference_run(setup: Setup, overflow_at: int) -> list[dict[str, Any]]:
    """Return the reference of each step: from this setup, or from one process on the whole batch."""
    alone = setup if setup.ranks == 1 else Setup("one process", clip=setup.clip)
    model, optimizer = training_setups.build(alone)
    out: list[dict[str, Any]] = []

    def weights() -> dict[str, Tensor]:
        return {n: p.detach().double().clone() for n, p in training_setups.named(model)}

    before = weights()

    def observe(moment: str, _step: int, loss: Tensor | None) -> None:
        nonlocal before
        if moment == "gradients":
            assert loss is not None
            grads = {n: p.grad.double().clone() for n, p in training_setups.named(model)}  # type: ignore[union-attr]
            out.append({"loss": loss.item(), "gradient": grads, "before": before})
        else:
            after = weights()
            out[-1]["update"] = {n: after[n] - before[n] for n in NAMES}
            before = after

    training_setups.train(alone, model, optimizer, overflow_at=overflow_at, observe=observe)
    return out


GRADIENT: dict[str, Callable[[Tensor], float]] = {
    "norm": lambda g: float(g.norm()),
    "max_abs": lambda g: float("nan") if g.isnan().any() else float(g.abs().max()),
    "sum": lambda g: float(g.sum()),
    "zeros": lambda g: float((g == 0).sum()),
    "numel": lambda g: float(g.numel()),
    "nan": lambda g: float(g.isnan().sum()),
    "inf": lambda g: float(g.isinf().sum()),
}


def health(setup: Setup, folder: Path) -> Outcome:
    """Check that joined statistics, losses and clips equal those of one process."""
    overflow_at = 1 if setup.scaled else -1
    reference = reference_run(setup, overflow_at)
    model, optimizer = training_setups.build(setup)
    with watched(
        model, optimizer, folder / "run", "health", every=1, health={"exact_updates": 1}
    ) as messages:
        training_setups.train(setup, model, optimizer, overflow_at=overflow_at)
    close = {"rel": 1e-6, "abs": 1e-9} if setup.ranks == 1 else {"rel": 1e-4, "abs": 1e-6}
    run = backlight.open_run(folder / "run")
    assert_nothing_missing(run, messages)
    for column, of in GRADIENT.items():
        frame = run.frame("gradient", column)
        assert frame.names == NAMES
        assert frame.measured.all(), f"{column}: {frame.measured}"
        expected = [[of(step["gradient"][name]) for name in NAMES] for step in reference]
        assert frame.values.astype(float) == pytest.approx(np.array(expected), nan_ok=True, **close), column
    updated = [number for number in range(STEPS) if number != overflow_at]
    for column, moment in (("update_norm", "update"), ("weight_norm", "before")):
        frame = run.frame("update", column)
        assert list(frame.steps) == updated
        expected = [[float(reference[number][moment][name].norm()) for name in NAMES] for number in updated]
        assert frame.values == pytest.approx(np.array(expected), **close), column
    losses = [step["loss"] for step in reference]
    assert run.scalar("loss").values == pytest.approx(losses, nan_ok=True, rel=1e-5)
    if setup.clip:
        norms = [np.sqrt(sum(float(g.norm()) ** 2 for g in s["gradient"].values())) for s in reference]
        assert run.scalar("clip/norm").values == pytest.approx(norms, nan_ok=True, rel=1e-4)
    if setup.scaled:
        skipped = [float(number == overflow_at) for number in range(STEPS)]
        assert list(run.scalar("scaler/skipped").values) == skipped
    return Outcome(TESTED)


# stalls


def stalls(setup: Setup, folder: Path) -> Outcome:
    """Check that a sleeping backward on the last rank is reported with its line, rank and state."""
    model, optimizer = training_setups.build(setup)
    sleeps = rank() == setup.ranks - 1
    pauses = Pauses(backward=SLEEP if sleeps else 0.0, step=2)
    with watched(model, optimizer, folder / "run", "stalls", stalls={"after": STALL}) as messages:
        wait_for_watchdog()
        training_setups.train(setup, model, optimizer, pauses=pauses)
    run = backlight.open_run(folder / "run")
    assert_nothing_missing(run, messages)
    found = [f for f in run.stored_findings() if f.rule == "stall"]
    assert len(found) == 1, [f.detail for f in found]
    about = found[0].subject
    lines = Path(training_setups.__file__).read_text(encoding="utf-8").splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.endswith("# at: backward"))
    assert about.line == f"{training_setups.__file__}:{line}", found[0].detail
    assert (about.verdict, about.phase, about.rank, about.step) == ("BLOCKED", "backward", setup.ranks - 1, 2)
    return Outcome(TESTED)


# grokking


def sample_loss(setup: Setup) -> Callable[[nn.Module, Batch], Tensor]:
    """Return the summed loss in the precision of the setup."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", setup.autocast, enabled=setup.autocast is not None):
            logits = model(batch[0])
        return F.cross_entropy(logits.float(), batch[1], reduction="sum")

    return loss


def probe() -> Batch:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(PROBE, FEATURES, generator=draw), torch.randint(CLASSES, (PROBE,), generator=draw)


def expected_gram(setup: Setup, state: dict[str, Tensor]) -> Tensor:
    """Return the Gram of per-sample gradients of a plain net, computed in a loop."""
    net = training_setups.net()
    net.load_state_dict(state)
    loss = sample_loss(setup)
    x, y = probe()
    rows = []
    for n in range(PROBE):
        grads = torch.autograd.grad(loss(net, (x[n : n + 1], y[n : n + 1])), list(net.parameters()))
        rows.append(torch.cat([g.double().flatten() for g in grads]))
    A = torch.stack(rows)
    return A @ A.T


def grokking(setup: Setup, folder: Path) -> Outcome:
    """Check that the stored Gram equals a loop over samples and stored gradients equal backward's."""
    reference = reference_run(setup, -1)
    note = ""
    if setup.whole_only:
        run, messages = _geometry(setup, folder / "without")
        assert not [name for name in run.array_names() if name.startswith(("gram/", "agop/"))]
        assert not any(f"gradient/{name}" in run.array_names() for name in ("up.weight", "down.weight"))
        gradients, gram = _reasons(run, messages).split(" | ")
        assert "a sharded gradient is on this rank in part only; it is not stored" in gradients
        note = f"without grokking={{'gather': True}}: {gram}"
    run, messages = _geometry(setup, folder / "run", **({"gather": True} if note else {}))
    assert_nothing_missing(run, messages)
    steps, matrices = run.array("gram/model/matrix")
    assert list(steps) == [0, 2]
    # In low precision, a loop over samples rounds in a different order.
    close = 1e-4 if setup.autocast is None else 3e-2
    for step, matrix in zip(steps, matrices, strict=True):
        state = {n: w.float() for n, w in reference[step]["before"].items()}
        expected = expected_gram(setup, state).numpy()
        assert matrix == pytest.approx(expected, rel=close, abs=close * float(np.abs(expected).max()))
    for name in NAMES:
        steps, gradients = run.array(f"gradient/{name}")
        assert list(steps) == [0, 2]
        for step, gradient in zip(steps, gradients, strict=True):
            assert gradient == pytest.approx(reference[step]["gradient"][name].numpy(), rel=1e-4, abs=1e-6)
    assert list(run.scalar("agop/trace").steps) == [0, 2]
    return Outcome(TESTED, note)


def _geometry(setup: Setup, path: Path, **more: Any) -> tuple[Run, list[str]]:
    model, optimizer = training_setups.build(setup)
    measures = {"every": 2, "gram": 1, "mean_gradient": 1, "window": 1, "vectors": 0, "agop": 1, **more}
    samples = (sample_loss(setup), probe())
    with watched(model, optimizer, path, "grokking", grokking=measures, samples=samples) as messages:
        training_setups.train(setup, model, optimizer)
    return backlight.open_run(path), messages


def _reasons(run: Run, messages: list[str]) -> str:
    """Return the reported reasons: warnings, else events of the run."""
    texts = [text for texts in gathered(messages) for text in texts] or unmeasured(run)
    texts = [re.sub(r"^backlight: |\.? Your training continues unchanged\.$", "", text) for text in texts]
    return " | ".join(dict.fromkeys(texts))


# spectra


def spectra(setup: Setup, folder: Path) -> Outcome:
    """Check singular values, noise and echo against gradients of single microbatches."""
    single = setup.name == "plain"
    micro = 4
    setup = training_setups.replace(setup, micro=micro)
    # The same net with the same arithmetic on this rank's data.
    model = setup.wrap(training_setups.net(setup)) if not together() else training_setups.net()
    reference = training_setups.replicates(setup, model, 0)
    if single:
        setup = training_setups.replace(setup, micro=1)
    model, optimizer = training_setups.build(setup)
    settings: dict[str, Any] = {"spectra": {"timeout": 60.0}}
    if single:
        settings["spectra"]["split"] = micro
        settings["samples"] = (_mean_loss, training_setups.whole_batch(0))
        reference = [{n: g * micro for n, g in part.items()} for part in reference]
    with watched(model, optimizer, folder / "run", "spectra", every=2, **settings) as messages:
        training_setups.train(setup, model, optimizer)
    of_all_ranks = gathered(reference)
    run = backlight.open_run(folder / "run")
    found = {(m.step, m.parameter) for m in stored.measurements(run)}
    measured = {name for _, name in found}
    for name in measured:
        assert {step for step, of in found if of == name} == {0, 2}
        table = stored.table(run, 0, name)
        expected = [spectral_echo([part[name] for part in parts], layer=name) for parts in of_all_ranks]
        assert any(_same(table, one) for one in expected), f"{name}: {_numbers(table, expected)}"
    left_out = stored.left_out(run)
    reported = _reasons(run, messages)
    assert set(MATRICES) == measured | (set(left_out) & set(MATRICES)), (measured, left_out, reported)
    if measured == set(MATRICES):
        assert_nothing_missing(run, messages)
        return Outcome(TESTED)
    reasons = dict.fromkeys(f"{name}: {left_out[name]}" for name in MATRICES if name not in measured)
    return Outcome(IN_PART if measured else REFUSED, " | ".join(reasons))


def _mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _same(table: stored.SpectraTable, expected: SpectralEcho) -> bool:
    # In layers with few directions, rounding decides how weaker ones are matched over replicates.
    k = expected.identifiable
    noise, wanted = table.measurement, expected.noise
    pairs = (
        (table.singular_values, expected.singular_values),
        (table["pooled"][:k], expected.pooled[:k]),
        (table["echo"][:k], expected.echo[:k]),
        (noise["noise_sigma"], wanted.sigma),
        (noise["signal_share"], wanted.signal_share),
    )
    return all(np.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True) for one, other in pairs)


def _numbers(table: stored.SpectraTable, expected: list[SpectralEcho]) -> str:
    found = [table.singular_values, table.measurement.numbers, table["pooled"]]
    return f"{found}, not any of {[(o.singular_values, o.noise, o.pooled) for o in expected]}"


# steptime

PAUSES = Pauses(data=0.02, loss=0.03, backward=0.04)


def steptime(setup: Setup, folder: Path) -> Outcome:
    """Check that phases contain the injected sleeps and add up to the time of the loop."""
    model, optimizer = training_setups.build(setup)
    at: dict[str, list[float]] = {"gradients": [], "update": []}

    def observe(moment: str, _step: int, _loss: Tensor | None) -> None:
        at[moment].append(time.perf_counter())

    with watched(model, optimizer, folder / "run", "steptime", every=1) as messages:
        training_setups.train(setup, model, optimizer, pauses=PAUSES, observe=observe)
    # A step ends between the times before and after its update, on a busy machine as well.
    least = gathered(at["gradients"][-1] - at["update"][1])[0]
    most = gathered(at["update"][-1] - at["gradients"][1])[0]
    run = backlight.open_run(folder / "run")
    assert_nothing_missing(run, messages)
    phases = {n: run.scalar(n).values for n in run.scalar_names() if n.startswith("phase/")}
    for phase, pause in (("data", PAUSES.data), ("loss", PAUSES.loss), ("backward", PAUSES.backward)):
        values = phases[f"phase/{phase}"]
        assert len(values) == STEPS, (phase, values)
        assert (values >= setup.micro * pause).all(), (phase, values)
    for phase in ("forward", "optimizer"):
        assert len(phases[f"phase/{phase}"]) == STEPS
        assert (phases[f"phase/{phase}"] > 0).all()
    assert "phase/between" not in phases
    # The first two steps include one-time set-up.
    steps = np.sum([values[2:] for values in phases.values() if len(values) == STEPS], axis=0)
    assert least <= steps.sum() <= most, phases
    return Outcome(TESTED)


# correctness


def correctness(setup: Setup, folder: Path) -> Outcome:
    """Check that a sound loop has no contradiction, and one that never clears gradients has that one."""
    for path, expected in ((folder / "sound", set()), (folder / "summed", {"gradients_not_cleared"})):
        model, optimizer = training_setups.build(setup)
        if expected:
            optimizer.zero_grad = lambda *_, **__: None  # type: ignore[method-assign]
        with watched(model, optimizer, path, "correctness") as messages:
            training_setups.train(setup, model, optimizer)
        run = backlight.open_run(path)
        assert_nothing_missing(run, messages)
        assert {event.payload["rule"] for event in run.events("contradiction")} == expected
        assert run.events("observed")
    return Outcome(TESTED)


# activations


def reference_outputs(setup: Setup) -> list[dict[str, tuple[float, float | None]]]:
    """Return rms of outputs and gradients by layer and step, by hooks of torch, of the first microbatch."""
    alone = setup if not isinstance(training_setups.build(setup)[0], OptimizedModule) else SETUPS["plain"]
    model, optimizer = training_setups.build(alone)
    outputs: list[dict[str, Tensor]] = [{}]
    sizes: list[dict[str, tuple[float, float | None]]] = []

    def hook(name: str) -> Callable[[Any, Any, Tensor], None]:
        def keep(_module: Any, _args: Any, output: Tensor) -> None:
            if name not in outputs[-1]:
                outputs[-1][name] = output
                if output.requires_grad:
                    output.retain_grad()

        return keep

    def observe(moment: str, _step: int, _loss: Tensor | None) -> None:
        if moment == "gradients":
            sizes.append(
                {name: (rms(x), None if x.grad is None else rms(x.grad)) for name, x in outputs[-1].items()}
            )
            outputs.append({})

    def rms(x: Tensor) -> float:
        return x.detach().double().square().mean().sqrt().item()

    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.register_forward_hook(hook(name.removeprefix("module.")))
    training_setups.train(alone, model, optimizer, observe=observe)
    return sizes


def activations(setup: Setup, folder: Path) -> Outcome:
    """Check that outputs and gradients are those that hooks of torch see on this rank."""
    reference = reference_outputs(setup)
    model, optimizer = training_setups.build(setup)
    options = {"activations": {"every": 1}}
    with watched(model, optimizer, folder / "run", "activations", every=1, **options) as messages:
        training_setups.train(setup, model, optimizer)
    run = backlight.open_run(folder / "run")
    assert not any(gathered(messages)), messages
    scale = training_setups.SCALE if setup.scaled else 1.0
    reasons = [
        f"{e.payload['what']}: {e.payload['reason']}" for e in run.events("unmeasured") if e.rank == rank()
    ]
    if isinstance(model, OptimizedModule):
        reference = [{"Net": step["last"]} for step in reference[1:]]  # the first step compiles
    measured = {name.rpartition("/")[2] for name in run.scalar_names()}
    assert measured > {"first", "last"} or isinstance(model, OptimizedModule)
    for name in reference[0]:
        if name not in measured:
            assert "activations of the class" in reasons[0]
            continue
        values = run.scalar(f"activations/rms/{name}", rank=rank()).values
        assert values == pytest.approx([step[name][0] for step in reference], rel=1e-5)
        gradients = [step[name][1] for step in reference]
        if None in gradients:
            assert setup.reentrant
            assert reasons
            continue
        values = run.scalar(f"activations/gradient/{name}", rank=rank()).values
        assert values == pytest.approx([size / scale for size in gradients if size is not None], rel=1e-5)
    return Outcome(IN_PART if reasons else TESTED, " | ".join(dict.fromkeys(reasons)))


# all of them


def identical(setup: Setup, folder: Path) -> Outcome:
    """Check that weights are bit-identical with all monitors and without any."""
    ends = []
    for path in (None, folder / "run"):
        model, optimizer = training_setups.build(setup, drop=0.1)
        run = contextlib.nullcontext([])
        if path is not None:
            monitors = ",".join(MONITORS)
            run = watched(  # type: ignore[assignment]
                model,
                optimizer,
                path,
                monitors,
                every=1,
                health={"exact_updates": 1, "histogram": True},
                samples=(sample_loss(setup), probe()),
                grokking={"every": 1, "gram": 1, "agop": 1, "vectors": 1, "top_k": 2},
                activations={"every": 1, "rank": True},
                spectra={"states": ("update", "momentum"), "split": 4},
            )
        with run:
            training_setups.train(setup, model, optimizer, steps=6, overflow_at=1 if setup.scaled else -1)
        ends.append((training_setups.weights(model), torch.get_rng_state()))
    (unwatched, drawn), (watched_weights, drawn_watched) = ends
    same = all(torch.equal(one, other) for one, other in zip(unwatched, watched_weights, strict=True))
    assert gathered(same) == [True] * setup.ranks, "watching has changed the weights"
    assert gathered(torch.equal(drawn, drawn_watched)) == [True] * setup.ranks
    return Outcome(TESTED)


MONITORS: dict[str, Callable[[Setup, Path], Outcome]] = {
    check.__name__: check for check in (health, correctness, stalls, grokking, spectra, steptime, activations)
}
CHECKS = {**MONITORS, "identical": identical}


def measure(monitor: str, setup: str, folder: Path) -> Outcome:
    """Run one cell."""
    folder.mkdir(parents=True, exist_ok=True)
    return CHECKS[monitor]({**SETUPS, **OTHERS}[setup], folder)
