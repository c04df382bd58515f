"""Sweep of a recipe over sizes, each in its own process: a fit of how the cost grows, and the answer.

Torch is imported by those processes alone.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from backlight import codec
from backlight.answer import Answer, Column, Table, ms, word
from backlight.launch.ray_tasks import RayOptions, run_tasks
from backlight.launch.recipe import RecipeError, parse_value, refuse_script
from backlight.launch.subprocess import run_in_own_session
from backlight.student_t import student_quantile
from backlight.text import assignments, count, percent, scaled, size

MAX_EXTRAPOLATION = 2.0
"""Factor beyond the measured range up to which a fit may be evaluated."""


class ScalingError(ValueError):
    """A fit is not possible, or was evaluated too far from the measured sizes."""


@dataclass(frozen=True)
class Exponent:
    """The power with which a quantity grows with one setting, and its interval."""

    quantity: str
    setting: str
    value: float
    low: float
    high: float

    @property
    def faster_than_linear(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.low > 1.0


@dataclass(frozen=True)
class PowerLaw:
    """A quantity as a power law of settings, one exponent for each; ``points`` is the number of sizes.

    ``misfit`` is the largest relative deviation of a point from the fit.
    """

    quantity: str
    exponents: tuple[Exponent, ...]
    points: int
    misfit: float
    constant: float
    ranges: Mapping[str, tuple[float, float]]

    def at(self, sizes: Mapping[str, float]) -> float:
        """Return the quantity at other sizes, within twice the measured range."""
        check_reach(self.ranges, sizes)
        total = sum(e.value * float(np.log(float(sizes[e.setting]))) for e in self.exponents)
        return float(np.exp(self.constant + total))


def check_reach(ranges: Mapping[str, tuple[float, float]], sizes: Mapping[str, float]) -> None:
    """Raise a ScalingError unless every setting has a size within twice its measured range."""
    for setting, (low, high) in ranges.items():
        if setting not in sizes:
            raise ScalingError(f"no value of {setting}; expected one for each swept setting")
        size = float(sizes[setting])
        if not low / MAX_EXTRAPOLATION <= size <= high * MAX_EXTRAPOLATION:
            raise ScalingError(
                f"{setting}={size:g} lies beyond twice the range that was measured ({low:g} to {high:g}): "
                "a power law is not known to hold there. Sweep nearer sizes"
            )


def fit(
    quantity: str,
    sizes: Mapping[str, Sequence[float]],
    values: Sequence[float],
    confidence: float = 0.95,
) -> PowerLaw:
    """Fit a power law of positive ``sizes`` by setting, each [points], to positive ``values`` [points]."""
    names = list(sizes)
    count = len(values)
    if count < len(names) + 2:
        raise ScalingError(
            f"{quantity}: {count} points for {len(names)} settings; an interval takes {len(names) + 2} or "
            "more"
        )
    table = np.array([[1.0] * count, *(sizes[name] for name in names)], dtype=np.float64).T
    target = np.asarray(values, dtype=np.float64)
    if (table <= 0).any() or (target <= 0).any() or not np.isfinite(target).all():
        raise ScalingError(f"{quantity}: a power law takes positive numbers")
    x, y = np.log(table), np.log(target)
    x[:, 0] = 1.0
    if np.linalg.matrix_rank(x) < x.shape[1]:
        raise ScalingError(
            f"{quantity}: {' and '.join(names)} move together, so that their exponents are not determined"
        )
    solution = np.linalg.lstsq(x, y, rcond=None)[0]
    rest = y - x @ solution
    freedom = count - x.shape[1]
    errors = np.sqrt(np.diag(np.linalg.inv(x.T @ x)) * float(rest @ rest) / freedom)
    reach = student_quantile(freedom, 0.5 + confidence / 2)
    exponents = tuple(
        Exponent(quantity, name, float(value), float(value - reach * error), float(value + reach * error))
        for name, value, error in zip(names, solution[1:], errors[1:], strict=True)
    )
    ranges = {name: (float(min(sizes[name])), float(max(sizes[name]))) for name in names}
    misfit = float(np.abs(np.expm1(rest)).max())
    return PowerLaw(quantity, exponents, count, misfit, float(solution[0]), ranges)


OUT_OF_MEMORY = "out of memory"
"""Status of a size that did not fit."""

DONE = frozenset({"measured", "predicted"})
"""Statuses of sizes with numbers."""


@dataclass(frozen=True)
class ScalingPoint:
    """One size; ``settings`` are those that differ between the points, None is not measured.

    ``status`` is ``measured``, ``predicted``, ``out of memory``, ``did not finish`` or ``failed``. Times are
    medians of the steady steps in milliseconds; ``memory`` are bytes at the peak, ``flops`` operations of a
    step. ``message`` states what limits the numbers, or why there are none.
    """

    settings: Mapping[str, Any]
    status: str
    parameters: int | None = None
    step_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    memory: int | None = None
    memory_by_kind: Mapping[str, int] = field(default_factory=dict)
    flops: int | None = None
    message: str = ""


@dataclass(frozen=True)
class Scaling:
    """A sweep: its points, a power law for each quantity that allows one, and notes on those that do not.

    ``faster`` are exponents whose whole interval lies above 1; ``expected`` are quantities at the requested
    size.
    """

    recipe: str
    fake: bool
    points: tuple[ScalingPoint, ...]
    laws: tuple[PowerLaw, ...]
    faster: tuple[Exponent, ...]
    expected: Mapping[str, float]
    notes: tuple[str, ...]


def parse_axes(pairs: Sequence[str]) -> dict[str, list[Any]]:
    """Return values by setting from ``name=value`` and ``name=value,value,...``."""
    axes: dict[str, list[Any]] = {}
    example = "name=value,value, such as dim=512,768,1024"
    for name, text in assignments(pairs, "--set", example, RecipeError).items():
        values = [part.strip() for part in text.split(",")]
        if not name.isidentifier() or not all(values):
            raise RecipeError(f"--set {name}={text}: expected {example}")
        axes[name] = list(dict.fromkeys(parse_value(value) for value in values))
    return axes


def sweep(
    recipe: Path,
    axes: Mapping[str, Sequence[Any]],
    *,
    fake: bool = False,
    steps: int = 30,
    limit: float = 600.0,
    max_memory: int | None = None,
    at: Mapping[str, Any] | None = None,
    on_point: Callable[[int, int], None] = lambda _done, _of: None,
    ray: RayOptions | None = None,
) -> Scaling:
    """Measure a recipe, or with ``fake`` predict it, at every combination of the values of ``axes``.

    Each is measured after the other here, or as tasks of ``ray``.

    Raises
    ------
    RecipeError
        If the recipe cannot be read, nothing is swept, or no size gave a result.
    ScalingError
        If a size of ``at`` lies beyond twice the range that would be measured.
    """
    if not recipe.is_file():
        raise RecipeError(f"{recipe}: no such recipe; expected a Python file below {Path.cwd()}")
    refuse_script(recipe)
    swept = [name for name, values in axes.items() if len(values) > 1]
    if not swept:
        raise RecipeError("nothing is swept: give a setting several values, such as --set dim=512,768,1024")
    if at:  # before hours of measurements, not after them
        sizes = {name: axes[name] for name in swept if all(map(_is_size, axes[name]))}
        check_reach({name: (min(values), max(values)) for name, values in sizes.items()}, at)
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    requests = [
        {
            "recipe": str(recipe if ray is None else recipe.absolute()),
            "settings": settings,
            "fake": fake,
            "steps": steps,
            "max_memory": max_memory,
        }
        for settings in combinations
    ]
    answers: dict[int, Mapping[str, Any]] = {}
    on_point(0, len(combinations))
    for number, result in _answers(requests, limit, ray):
        answers[number] = result
        on_point(len(answers), len(combinations))
    points = [
        ScalingPoint({name: settings[name] for name in swept}, **answers[number])
        for number, settings in enumerate(combinations)
    ]
    if all(point.status == "failed" for point in points):
        raise RecipeError(f"no size gave a result: {points[0].message}")
    laws, notes = _laws(points)
    expected = {}
    try:
        expected = {law.quantity: law.at(at) for law in laws} if at else {}
    except ScalingError as error:  # sizes failed, so that less was measured than asked for
        notes.append(str(error))
    faster = tuple(e for law in laws for e in law.exponents if e.faster_than_linear)
    return Scaling(str(recipe), fake, tuple(points), tuple(laws), faster, expected, tuple(notes))


def _answers(
    requests: Sequence[Mapping[str, Any]], limit: float, ray: RayOptions | None
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield number and result of each size, as they end."""
    if ray is None:
        for number, request in enumerate(requests):
            yield number, _ask(request, limit)
        return
    for number, result in run_tasks(_ask, [(request, limit) for request in requests], ray):
        lost = isinstance(result, BaseException)
        yield number, {"status": "failed", "message": f"Ray: {result}"} if lost else result


def _ask(request: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """Return the result of one size, from its own process."""
    with tempfile.TemporaryDirectory(prefix="backlight-sweep-") as folder:
        question, out = Path(folder) / "request.json", Path(folder) / "answer.json"
        question.write_text(codec.encode_row(request), encoding="utf-8")
        command = [sys.executable, "-m", "backlight.diagnose.scaling.worker", str(question), str(out)]
        try:
            done = run_in_own_session(command, limit=limit, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        except subprocess.TimeoutExpired:
            return {"status": "did not finish", "message": f"not within {limit:g} s (--limit)"}
        if out.is_file():
            names = {f for f in ScalingPoint.__dataclass_fields__ if f != "settings"}
            return {k: v for k, v in codec.decode(out.read_text(encoding="utf-8")).items() if k in names}
        if done.returncode == -signal.SIGKILL:
            return {"status": OUT_OF_MEMORY, "message": "the system ended the process (SIGKILL)"}
        last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        return {"status": "failed", "message": f"ended with exit code {done.returncode}: {last[0]}"}


def _laws(points: Sequence[ScalingPoint]) -> tuple[list[PowerLaw], list[str]]:
    """Fit each quantity over the points that have it, against the swept settings that are numbers."""
    done = [point for point in points if point.status in DONE]
    names = [
        name
        for name in (points[0].settings if points else ())
        if all(_is_size(point.settings[name]) for point in points)
        and len({point.settings[name] for point in done}) > 1
    ]
    others = [name for name in points[0].settings if name not in names]
    if not names:
        return [], ["no setting with two or more sizes that worked is a positive number: nothing is fitted"]
    if others:
        return [], [f"{', '.join(others)} is no number, or worked at one value only: nothing is fitted"]
    laws, notes = [], []
    for quantity, values in _quantities(done).items():
        kept = [(point, value) for point, value in zip(done, values, strict=True) if value]
        sizes = {name: [float(point.settings[name]) for point, _ in kept] for name in names}
        try:
            laws.append(fit(quantity, sizes, [value for _, value in kept]))
        except ScalingError as error:
            notes.append(str(error))
    return laws, list(dict.fromkeys(notes))


def _quantities(done: Sequence[ScalingPoint]) -> dict[str, list[float]]:
    """Return the quantities by name, 0 where a point lacks one."""
    quantities: dict[str, list[float]] = {}
    for name in ("parameters", "step_ms", "memory", "flops"):
        values = [float(getattr(point, name) or 0) for point in done]
        if any(values):
            quantities[name] = values
    whole = [sum(point.phases.values()) for point in done]
    for phase in dict.fromkeys(phase for point in done for phase in point.phases):
        values = [point.phases.get(phase, 0.0) for point in done]
        # A phase that is never a hundredth of a step grows with the clock's noise.
        if any(value > 0.01 * total for value, total in zip(values, whole, strict=True)):
            quantities[f"phase {phase}"] = values
    return quantities


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


# Answer of ``sweep``: what grows fastest, and tables of sizes and of exponents with intervals.


PHASES = 4
"""Phases that a table has next to the settings."""

UNITS = {"step_ms": "step", "memory": "memory", "flops": "operations", "parameters": "parameters"}


def answer(scaling: Scaling) -> Answer:
    """Return the answer of a sweep."""
    tables = tuple(table for table in _tables(scaling) if table.rows)
    return Answer(_verdict(scaling), scaling, tuple(_facts(scaling)), tables, scaling.notes)


def _tables(scaling: Scaling) -> Iterator[Table]:
    swept = [Column(name, partial(_setting, name), str) for name in scaling.points[0].settings]
    steps = Column("step ms", _step, str)
    memory, flops = (
        Column(title, partial(_done, key), partial(_value, key))
        for title, key in (("memory", "memory"), ("operations", "flops"))
    )
    costs = (
        [memory, flops]
        if scaling.fake
        else [steps, *([memory] if any(p.memory for p in scaling.points) else [])]
    )
    parameters = Column("parameters", partial(_done, "parameters"), partial(_value, "parameters"))
    status = [] if all(point.status in DONE for point in scaling.points) else [word("status", "status")]
    yield Table((*swept, parameters, *costs, *status), scaling.points, brief=60)
    phases = list(dict.fromkeys(phase for point in scaling.points for phase in point.phases))
    for start in range(0, len(phases), PHASES):
        part = (
            Column(f"{phase.replace('_', ' ')} ms", partial(_phase, phase), ms)
            for phase in phases[start : start + PHASES]
        )
        yield Table((*swept, *part), scaling.points, brief=60)
    settings = [exponent.setting for exponent in scaling.laws[0].exponents] if scaling.laws else []
    powers = (Column(f"power of {name}", partial(_exponent, n), str) for n, name in enumerate(settings))
    faster = dict.fromkeys(f"{_name(e.quantity)} in {e.setting}" for e in scaling.faster)
    yield Table(
        (word("grows as", lambda law: _name(law.quantity)), *powers, Column("misfit", "misfit", percent)),
        scaling.laws, brief=60, notes=(f"faster than linear: {', '.join(faster)}",) if faster else (),
    )  # fmt: skip


def _setting(name: str, point: ScalingPoint) -> Any:
    return point.settings[name]


def _done(key: str, point: ScalingPoint) -> Any:
    return getattr(point, key) if point.status in DONE else None


def _phase(name: str, point: ScalingPoint) -> float | None:
    return point.phases.get(name)


def _exponent(number: int, law: PowerLaw) -> str:
    exponent = law.exponents[number]
    return f"{exponent.value:.2f} ({exponent.low:.2f} to {exponent.high:.2f})"


def _step(point: ScalingPoint) -> str | None:
    if point.status not in DONE or point.step_ms is None:
        return None
    return f"{point.step_ms:.2f} ± {((point.high_ms or 0.0) - (point.low_ms or 0.0)) / 2:.2f}"


def _verdict(scaling: Scaling) -> str:
    """Return how the step, or its predicted memory, grows, in one line."""
    main = "memory" if scaling.fake else "step_ms"
    law = next((law for law in scaling.laws if law.quantity == main), None)
    if law is None:
        done = sum(point.status in DONE for point in scaling.points)
        why = next(iter(scaling.notes), "see --json")
        return f"no growth fitted: {count(done, 'size')} of {len(scaling.points)} ran; {why}"
    fastest = max(law.exponents, key=lambda exponent: exponent.value)
    if fastest.low <= 0:
        return (
            f"{_name(main)}: growth with {fastest.setting} is undecided: {_power(fastest)}; sweep more sizes"
        )
    pace = ", faster than linear" if fastest.faster_than_linear else ""
    how = "grows fastest with" if len(law.exponents) > 1 else "grows with"
    return f"{_name(main)} {how} {fastest.setting}: {_power(fastest)}{pace}"


def _facts(scaling: Scaling) -> list[str]:
    """Return the lines behind the verdict."""
    shown = "memory" if scaling.fake else "step_ms"
    done = [point for point in scaling.points if point.status in DONE]
    ends = [done[0], done[-1]] if len(done) > 1 else done
    lines = ["; ".join(f"{_where(point)}: {_value(shown, getattr(point, shown))}" for point in ends)]
    lines += [
        f"{_where(point)}: {point.status}{': ' * bool(point.message)}{point.message}"
        for point in scaling.points
        if point.status not in DONE
    ]
    lines += [f"expected {_name(name)}: {_value(name, value)}" for name, value in scaling.expected.items()]
    main = sorted(scaling.laws, key=lambda law: law.quantity.startswith("phase"))
    lines += [
        f"{_name(law.quantity)}: {', '.join(f'{e.setting} {_power(e)}' for e in law.exponents)}; "
        f"misfit {percent(law.misfit)}"
        for law in main
    ]
    return [line for line in lines if line]


def _power(exponent: Exponent) -> str:
    return f"power {exponent.value:.2f} ({exponent.low:.2f} to {exponent.high:.2f})"


def _where(point: ScalingPoint) -> str:
    return ", ".join(f"{name}={value}" for name, value in point.settings.items())


def _name(quantity: str) -> str:
    return UNITS.get(quantity, quantity).replace("_", " ")


def _value(quantity: str, value: float | None) -> str:
    if value is None:
        return "not measured"
    if quantity == "memory":
        return size(value)
    if quantity == "flops":
        return scaled(value, "FLOP")
    if quantity == "parameters":
        return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value:,.0f}"
    return f"{value:.2f} ms"
