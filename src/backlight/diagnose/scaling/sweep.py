"""Sweep of a recipe over sizes: each in its own process with a time limit, and a fit of how its cost grows.

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
from pathlib import Path
from typing import Any

from backlight import codec
from backlight.diagnose.scaling.power_law import Exponent, PowerLaw, ScalingError, check_reach, fit
from backlight.launch.ray_tasks import RayOptions, run_tasks
from backlight.launch.recipe import RecipeError, parse_value, refuse_script
from backlight.launch.subprocess import run_in_own_session
from backlight.text import assignments

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
