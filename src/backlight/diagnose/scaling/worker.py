"""Worker process that measures or predicts one size of a recipe for :mod:`backlight.diagnose.scaling.sweep`.

``python -m backlight.diagnose.scaling.worker REQUEST ANSWER`` reads a JSON file and writes one.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backlight import codec, devices
from backlight.capture.phase_clock import PhaseClock
from backlight.diagnose.memory.result import PredictionError
from backlight.diagnose.profile.step_summary import StepTime, summarize_steps
from backlight.launch.recipe import REQUIRED, Recipe, RecipeError, read_recipe
from backlight.monitors.steptime.model.step_times import SeriesError
from backlight.records import Phase
from backlight.user_code import user_line

OUT_OF_MEMORY = "out of memory"
"""Status of a size that does not fit into memory; a sweep lists it as a result."""


def measure(recipe: Recipe, steps: int) -> dict[str, Any]:
    """Run some steps of a recipe under a clock; on an accelerator it waits at the ends of phases."""
    import torch  # noqa: PLC0415 - a prediction runs in another process

    model = recipe.build_model()
    optimizer = (
        recipe.build_optimizer(model)
        if recipe.has("build_optimizer")
        else torch.optim.SGD(model.parameters(), lr=0.0)
    )
    parameters = {id(p): p for p in model.parameters()}.values()
    device = next((p.device for p in parameters if devices.is_accelerator(p.device)), None)
    clock = PhaseClock()

    def enter(phase: Phase) -> None:
        if device is not None:
            devices.synchronize("end of a phase", device)
        clock.enter(phase)

    def leave(phase: Phase) -> None:
        if device is not None:
            devices.synchronize("end of a phase", device)
        clock.leave(phase)

    model.register_forward_pre_hook(
        lambda *_args: None if Phase.BACKWARD in clock.open else enter(Phase.FORWARD)
    )
    model.register_forward_hook(lambda *_args: leave(Phase.FORWARD), always_call=True)
    batches: Iterator[Any] = recipe.batches()
    taken = []
    clock.take()
    for number in range(steps):
        enter(Phase.DATA)
        batch = next(batches, None)
        leave(Phase.DATA)
        if batch is None:
            raise ValueError(f"{recipe.path}: batches ended after {number} of {steps} steps")
        loss = recipe.loss(model, batch)
        enter(Phase.BACKWARD)
        loss.backward()  # type: ignore[no-untyped-call]  # as torch has it
        leave(Phase.BACKWARD)
        enter(Phase.OPTIMIZER)
        optimizer.step()
        optimizer.zero_grad()
        leave(Phase.OPTIMIZER)
        separated = clock.separated
        taken.append(StepTime.of(*clock.take(), separated))
    profile = summarize_steps(taken)
    if profile.step is None:
        raise ValueError(f"{recipe.path}: {profile.trouble}")
    return {
        "status": "measured",
        "parameters": sum(p.numel() for p in parameters),
        "step_ms": profile.step.median_ms,
        "low_ms": profile.step.low_ms,
        "high_ms": profile.step.high_ms,
        "phases": {name: phase.median_ms for name, phase in profile.phases.items()},
        "memory": devices.peak_allocated(device) if device is not None else None,
        "message": profile.trouble,
    }


def predict_size(recipe: Recipe) -> dict[str, Any]:
    """Predict memory and operations of a step on fake tensors."""
    from backlight.diagnose.memory.predictor import predict  # noqa: PLC0415 - a measurement needs none of it

    prediction = predict(recipe)
    return {
        "status": "predicted",
        "parameters": prediction.parameters,
        "memory": prediction.peak,
        "memory_by_kind": {str(kind): size for kind, size in prediction.kinds.items()},
        "flops": prediction.flops.step,
        "message": "",
    }


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one size; an error and running out of memory are results."""
    if request.get("max_memory"):
        import resource  # noqa: PLC0415 - only where a limit was asked for

        resource.setrlimit(resource.RLIMIT_DATA, (int(request["max_memory"]),) * 2)
    try:
        recipe = read_recipe(request["recipe"], request["settings"], REQUIRED)
        return predict_size(recipe) if request["fake"] else measure(recipe, int(request["steps"]))
    except (RecipeError, PredictionError, SeriesError) as error:
        return {"status": "failed", "message": str(error)}
    except MemoryError:
        return {"status": OUT_OF_MEMORY, "message": "MemoryError"}
    except Exception as error:  # noqa: BLE001 - a recipe may raise anything, and the other sizes go on
        first = (str(error).strip().splitlines() or [""])[0]
        status = OUT_OF_MEMORY if _is_memory(error) else "failed"
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        line = user_line(innermost)
        at = "" if line is None else f" ({line})"
        return {"status": status, "message": f"{type(error).__name__}: {first}{at}"}


def _is_memory(error: Exception) -> bool:
    text = str(error).lower()
    named = type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in text or "out of memory" in text or "not enough memory" in text


def main(arguments: list[str]) -> None:
    """Answer one request."""
    request, out = (Path(argument) for argument in arguments)
    out.write_text(
        codec.encode_row(answer(codec.decode(request.read_text(encoding="utf-8")))), encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
