"""Facts that held in good runs, and whether they hold in another one. No torch.

A good run states what its author meant: which parameters get gradients, in which order a step calls what, in
which mode modules are, how large inputs, losses and gradients are. Numbers may differ between seeds and batch
sizes; a number contradicts the good runs only where it is far from all that they recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.answer import Answer, Table, word
from backlight.findings.evaluate import findings_of, separate_hints
from backlight.monitors.correctness.model.facts import facts_of
from backlight.monitors.correctness.model.habits import Habits
from backlight.records import Severity
from backlight.report.source import rate_labels
from backlight.store.read.run import Run
from backlight.text import count, listed, number, percent

FAR = 3.0
"""Factor by which a number lies outside all values of the good runs before it contradicts them."""

FAR_GRADIENT = 10.0
"""The same for the norm of the gradient of one parameter, relative to the others."""

ROUNDING = 1e-5
"""Gradient of a parameter relative to the others, below which it is rounding: of a bias before a norm."""

FIRST_STEPS = 8
"""Steps at the start of a run over which its first loss is taken."""

LEAST_FALL = 0.1
"""Share of the fall of the loss of the good runs, below which the loss of a run does not fall."""

NAMED = 3
"""Parameters that a fact names."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ReferenceFact:
    """What held in the good runs, what the run has in its place, and whether both agree.

    ``holds`` is None where the run did not record it. A ``setting`` is a choice of the author, such as a
    batch size: it is shown and contradicts nothing.
    """

    name: str
    good: str
    here: str
    holds: bool | None
    setting: bool = False

    @property
    def text(self) -> str:
        """What is here and what is there."""
        return f"{self.name}: here {self.here}; there {self.good}"

    @property
    def word(self) -> str:
        """How the fact is marked in a table."""
        if self.holds is None:
            return "not measured"
        return "holds" if self.holds else "differs" if self.setting else "contradicted"


@dataclass(frozen=True)
class Reference:
    """The comparison of a run with good ones."""

    run: str
    good: tuple[str, ...]
    compared: tuple[ReferenceFact, ...]

    @property
    def contradicted(self) -> tuple[ReferenceFact, ...]:
        """The facts that the run contradicts."""
        return tuple(fact for fact in self.compared if fact.holds is False and not fact.setting)


def compare_with(good: Sequence[Run], run: Run) -> Reference:
    """Compare ``run`` with good ones; a ValueError where nothing of a run or of all can be compared."""
    if not good:
        raise ValueError("expected one good run or more to compare with, got none")
    for each in (*good, run):
        if each.last_step() < 0:
            raise ValueError(f"{each.location}: took no step, so that nothing of it can be compared")
    parts: Sequence[Callable[[Sequence[Run], Run], Iterator[ReferenceFact]]] = (
        _gradients, _loop, _rates, _losses, _norms, _findings,
    )  # fmt: skip
    facts = tuple(fact for part in parts for fact in part(good, run))
    if not any(fact.holds is not None for fact in facts):
        raise ValueError(f"{run.location}: nothing that {good[0].location} recorded is recorded in it")
    return Reference(run.location, tuple(each.location for each in good), facts)


# Which parameters get gradients


def _shares(run: Run) -> dict[str, float]:
    """Return at which share of the recorded steps each trainable parameter had a gradient that is not 0."""
    if not run.has("gradient"):
        return {}
    frame = run.frame("gradient", "norm")
    if not len(frame.steps):
        return {}
    has = frame.measured & (frame.values != 0)  # NaN is a gradient
    return {name: float(has[:, i].mean()) for i, name in enumerate(frame.names)}


def _gradients(good: Sequence[Run], run: Run) -> Iterator[ReferenceFact]:
    shares, here = [_shares(each) for each in good], _shares(run)
    common = [name for name in shares[0] if all(name in each for each in shares)]
    shared = [name for name in common if name in here]
    if not common or not here:
        return
    if not shared:
        yield ReferenceFact("names of parameters", listed(common, NAMED), listed(list(here), NAMED), None)
        return
    always = [name for name in shared if all(each[name] == 1 for each in shares)]
    never = [name for name in shared if all(each[name] == 0 for each in shares)]
    lost = [name for name in always if here[name] < 0.5]
    new = [name for name in never if here[name] >= 0.5]
    yield ReferenceFact(
        "gradients at every step",
        count(len(always), "parameter"),
        f"none, or zero, at most steps: {_names(lost)}" if lost else "the same",
        not lost,
    )
    if never:
        yield ReferenceFact(
            "parameters without a gradient", _names(never), _names(new, "now with one: "), not new
        )
    untrained = [{p.name for p in each.parameters() if not p.group} for each in (*good, run)]
    never_held = set(shared).intersection(*untrained[:-1])
    dropped = [name for name in shared if name in untrained[-1] and name not in set().union(*untrained[:-1])]
    taken = [name for name in shared if name in never_held and name not in untrained[-1]]
    shown = _names(dropped, "without ") if dropped else _names(taken, "now also ")
    yield ReferenceFact(
        "parameters that an optimizer holds", count(len(shared) - len(never_held), "parameter"), shown,
        not dropped and not taken,
    )  # fmt: skip
    dtypes = [{p.name: p.dtype for p in each.parameters()} for each in good]
    current = {p.name: p.dtype for p in run.parameters()}
    changed = [n for n in shared if n in current and current[n] not in {each.get(n) for each in dtypes}]
    shown = f"{current[changed[0]]}: {_names(changed)}" if changed else "the same"
    yield ReferenceFact("type of weights", listed(sorted(set(dtypes[0].values())), NAMED), shown, not changed)


def _names(names: Sequence[str], before: str = "") -> str:
    return f"{before}{listed(list(names), NAMED)}" if names else "the same"


# What the loop does


def _habits(run: Run) -> Habits | None:
    recorded = facts_of(run, Habits)
    return recorded[-1] if recorded else None


def _loop(good: Sequence[Run], run: Run) -> Iterator[ReferenceFact]:
    habits, here = [h for each in good if (h := _habits(each)) is not None], _habits(run)
    if not habits or here is None:
        return
    orders = {_main(each.orders) for each in habits}
    order = _main(here.orders)
    yield ReferenceFact("calls of a step", " or ".join(sorted(orders)), order, order in orders)
    for kind in ("dropout", "batch norm"):
        modes = {_mode(each, kind) for each in habits}
        current = _mode(here, kind)
        if "" not in modes and current:  # else another architecture
            yield ReferenceFact(f"mode of {kind}", " or ".join(sorted(modes)), current, current in modes)
    losses = [set(each.losses) for each in habits]
    yield ReferenceFact(
        "loss functions", _kinds(set.union(*losses)), _kinds(set(here.losses)), set(here.losses) in losses
    )
    outputs = [set(each.outputs) for each in habits]
    yield ReferenceFact(
        "types of outputs",
        _kinds(set.union(*outputs)),
        _kinds(set(here.outputs)),
        set(here.outputs) in outputs,
    )
    yield from _inputs(habits, here)


def _mode(habits: Habits, kind: str) -> str:
    """Return the mode of the modules of a kind as the optimizer steps; empty where there are none."""
    return " and ".join(
        mode for mode in ("training", "evaluation") if habits.modes.get(f"{kind} in {mode} mode")
    )


def _main(orders: Mapping[str, int]) -> str:
    """Return the order of most steps: the first one lacks what follows the optimizer."""
    return max(orders, key=lambda order: orders[order], default="")


def _kinds(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none known"


def _inputs(habits: Sequence[Habits], here: Habits) -> Iterator[ReferenceFact]:
    for place, tensor in enumerate(here.inputs):
        others = [each.inputs[place] for each in habits if len(each.inputs) > place]
        if not others:
            continue
        name = f"input {place}" if len(here.inputs) > 1 else "input"
        types = {f"{o.dtype}, {count(o.dimensions, 'dimension')}" for o in others}
        current = f"{tensor.dtype}, {count(tensor.dimensions, 'dimension')}"
        yield ReferenceFact(f"type of {name}", " or ".join(sorted(types)), current, current in types)
        means = [o.mean for o in others if o.mean is not None]
        sizes = [o.rms for o in others if o.rms is not None]
        if tensor.rms is not None and tensor.mean is not None and sizes:
            yield ReferenceFact(
                f"size of {name} (rms)", _range(sizes), number(tensor.rms), _is_near(tensor.rms, sizes)
            )
            # Against the largest rms: a mean near 0 has no scale of its own.
            shift = min(abs(tensor.mean - mean) for mean in means) / (max(sizes) or math.inf)
            yield ReferenceFact(f"mean of {name}", _range(means), number(tensor.mean), shift <= 1)
        batches = {n for o in others for n in o.samples}
        yield ReferenceFact(
            f"first dimension of {name}", _span(batches), _span(set(tensor.samples)),
            min(batches) <= tensor.samples[1] <= max(batches), setting=True,
        )  # fmt: skip


def _span(values: set[int]) -> str:
    return f"{min(values)}" if len(values) == 1 else f"{min(values)} to {max(values)}"


# Rates, losses and norms


def _rates(good: Sequence[Run], run: Run) -> Iterator[ReferenceFact]:
    names = [name for name in run.scalar_names("backlight") if name.startswith("lr/")]
    labels = rate_labels(run, names)
    for name in names:
        others = [values for each in good if len(values := _scalar(each, name))]
        here, label = _scalar(run, name), f"learning rate of {labels[name]}"
        if not others or not len(here):
            continue
        # Early steps of a long schedule may show the same rate.
        length = min(len(here), *map(len, others))
        varies = {len(set(values[:length].tolist())) > 1 for values in others}
        is_varying = len(set(here[:length].tolist())) > 1
        if len(varies) == 1 and length > 1:
            texts = {True: "changes", False: "constant"}
            yield ReferenceFact(
                f"{label} over {count(length, 'step')}", texts[min(varies)], texts[is_varying],
                is_varying in varies,
            )  # fmt: skip
        peaks = [float(values.max()) for values in others]
        peak = float(here.max())
        yield ReferenceFact(
            f"largest {label}", _range(peaks), number(peak),
            any(math.isclose(peak, each, rel_tol=1e-6) for each in peaks), setting=True,
        )  # fmt: skip


def _scalar(run: Run, name: str) -> Floats:
    return np.asarray(run.scalar(name).values if name in run.scalar_names() else [], dtype=np.float64)


def _losses(good: Sequence[Run], run: Run) -> Iterator[ReferenceFact]:
    curves = [values for each in good if len(values := _scalar(each, "loss"))]
    here = _scalar(run, "loss")
    if not curves or not len(here):
        return
    if all(np.isfinite(values).all() for values in curves):
        bad = int((~np.isfinite(here)).sum())
        yield ReferenceFact(
            "losses are finite",
            "at every step",
            f"not at {count(bad, 'step')}" if bad else "at every step",
            not bad,
        )
        if bad:
            return
    values = np.concatenate([values[:FIRST_STEPS] for values in curves])
    first = float(np.median(here[:FIRST_STEPS]))
    is_positive = bool((values > 0).all()) and first > 0
    # Of some losses, such as that of a regression, the first depends on how the weights are drawn.
    if is_positive and max(values) < FAR * min(values):
        yield ReferenceFact("first losses", _range(values), number(first), _is_near(first, values))
    length = min(len(here), *map(len, curves))
    if length >= 4 * FIRST_STEPS and is_positive:
        falls = [_fall(values[:length]) for values in curves]
        noise = max(float(np.std(np.diff(values[:length]))) / values[0] for values in curves)
        if min(falls) > 4 * noise:
            fall = _fall(here[:length])
            yield ReferenceFact(
                f"fall of the loss over {count(length, 'step')}, of the first ones",
                " to ".join(dict.fromkeys(map(percent, (min(falls), max(falls))))), percent(fall),
                fall > LEAST_FALL * min(falls),
            )  # fmt: skip


def _fall(values: Floats) -> float:
    """Return by which share of the first losses the last quarter is lower."""
    first, last = np.median(values[:FIRST_STEPS]), np.median(values[-(len(values) // 4) :])
    return float(1 - last / first)


def _norms(good: Sequence[Run], run: Run) -> Iterator[ReferenceFact]:
    totals = [values for each in good if len(values := _scalar(each, "total_norm"))]
    here = _scalar(run, "total_norm")
    if not totals or not len(here):
        return
    length = min(len(here), *map(len, totals))
    values = np.concatenate([each[:length] for each in totals])
    values = values[np.isfinite(values) & (values > 0)]
    norm = float(np.median(here[:length]))
    if len(values):
        yield ReferenceFact("gradient norm (median)", _range(values), number(norm), _is_near(norm, values))
    for series, column, label in (
        ("gradient", "rms", "gradient rms"), ("update", "ratio", "update / weight"),
    ):  # fmt: skip
        # Gradients of a loss that has fallen are in other proportions.
        until = min(each.last_step() for each in (*good, run))
        ratios = [_relative(each, series, column, until) for each in good]
        current = _relative(run, series, column, until)
        shared = [name for name in current if all(name in each for each in ratios)]
        usual = {name: [each[name] for each in ratios] for name in shared}
        usual = {name: values for name, values in usual.items() if min(values) > ROUNDING}
        if len(usual) < 2:
            continue
        far = [name for name, values in usual.items() if not _is_near(current[name], values, FAR_GRADIENT)]
        shown = [f"{name} {number(current[name])} ({_range(usual[name])} there)" for name in far]
        yield ReferenceFact(
            f"{label} of each parameter, relative to their median", count(len(usual), "parameter"),
            listed(shown, NAMED) if far else "the same", not far,
        )  # fmt: skip
    clipped = {"clip/factor" in each.scalar_names() for each in good}
    if len(clipped) == 1:
        texts = {True: "yes", False: "no"}
        is_clipped = "clip/factor" in run.scalar_names()
        yield ReferenceFact(
            "gradients are clipped", texts[min(clipped)], texts[is_clipped], is_clipped in clipped
        )


def _relative(run: Run, series: str, column: str, until: int) -> dict[str, float]:
    """Return the median of a column up to a step for each parameter, over that of the median parameter."""
    if not run.has(series):
        return {}
    frame = run.frame(series, column)
    medians = {}
    for i, name in enumerate(frame.names):
        values = frame.values[frame.measured[:, i] & (frame.steps <= until), i]
        values = values[np.isfinite(values)]
        if len(values):
            medians[name] = float(np.median(values))
    middle = float(np.median([value for value in medians.values() if value > 0] or [1.0]))
    return {name: value / middle for name, value in medians.items()}


def _is_near(value: float, values: Sequence[float] | Floats, factor: float = FAR) -> bool:
    """Return whether a positive value is within a factor of the range of others."""
    return bool(min(values) / factor <= value <= factor * max(values))


def _range(values: Sequence[float] | Floats) -> str:
    low, high = number(float(min(values))), number(float(max(values)))
    return low if low == high else f"{low} to {high}"


# Findings


def _findings(good: Sequence[Run], run: Run) -> Iterator[ReferenceFact]:
    usual = {finding.rule for each in good for finding in findings_of(each)}
    monitors = {monitor for each in good for monitor in each.monitors}
    findings = separate_hints(findings_of(run))[0]
    new = [
        f
        for f in findings
        if f.severity is not Severity.INFO and f.rule not in usual and f.monitor in monitors
    ]
    yield ReferenceFact(
        "findings",
        "none of these rules",
        listed([f.title for f in new], NAMED) if new else "none that is new",
        not new,
    )


# The answer


def answer(reference: Reference) -> Answer:
    """Return how many facts of the good runs the run contradicts, and each of them."""
    contradicted = reference.contradicted
    tested = [fact for fact in reference.compared if fact.holds is not None and not fact.setting]
    runs = listed(list(reference.good), NAMED)
    if contradicted:
        verdict = f"{count(len(contradicted), 'fact')} of {len(tested)} that held in {runs} do not hold here."
        if len(contradicted) == 1:
            verdict = verdict.replace(" do not ", " does not ")
    else:
        verdict = f"All {count(len(tested), 'fact')} that held in {runs} hold here."
    facts = [fact.text for fact in contradicted]
    settings = [f"{f.name} {f.good} / {f.here}" for f in reference.compared if f.setting and f.holds is False]
    facts += [f"chosen otherwise: {listed(settings, NAMED)}"] if settings else []
    columns = (
        word("fact", "name", "text"), word("good", "good", "text"), word("here", "here", "text"),
        word("", "word"),
    )  # fmt: skip
    notes: tuple[str, ...] = ()
    if len(reference.good) == 1:
        notes = ("One good run shows little of how numbers vary: give several with --against each.",)
    return Answer(verdict, reference, tuple(facts), (Table(columns, reference.compared, brief=60),), notes)
