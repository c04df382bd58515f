"""Panel of the machine: memory of the process, and counters of its GPU."""

from __future__ import annotations

import numpy as np

from backlight.monitors.steptime.model.evidence import DEVICE_PREFIX, HOST_MEMORY
from backlight.monitors.steptime.model.machine import machine_scalar, memory_growth
from backlight.report.charts import Axis, Line, chart
from backlight.report.panel import Drawn, NotMeasured, PanelFact, panel
from backlight.report.source import Source
from backlight.text import percent, size

_GPU = (("utilization", 100.0, "GPU busy (%)"), ("memory", 1e-9, "GPU memory (GB)"),
        ("temperature", 1.0, "GPU temperature (\N{DEGREE SIGN}C)"))  # fmt: skip


@panel(
    "machine",
    title="Machine",
    order=57,
    series=("scalars/host", "scalars/gpu"),
    note="Memory of the process, and what the driver of its GPU counts, about once a second.",
    monitor="steptime",
)
def machine(source: Source) -> Drawn | NotMeasured:
    """Draw each reading over the steps."""
    memory = machine_scalar(source.run, HOST_MEMORY)
    if memory is None:
        return NotMeasured(source.reason("host", "steptime", otherwise="The run was too short to read it."))
    line = Line("memory", memory.steps, memory.values * 1e-9)
    charts = [chart([line], Axis("memory of the process (GB)", low=0.0))]
    facts = [PanelFact("memory at the end", size(float(memory.values[-1])))]
    growth = memory_growth(source.run)
    if growth is not None:
        facts.append(PanelFact("grows", f"{size(growth.per_step)} a step"))
    for name, factor, title in _GPU:
        scalar = machine_scalar(source.run, f"{DEVICE_PREFIX}{name}")
        if scalar is not None:
            charts.append(chart([Line(name, scalar.steps, scalar.values * factor)], Axis(title, low=0.0)))
    throttled = machine_scalar(source.run, f"{DEVICE_PREFIX}throttled")
    if throttled is not None:
        facts.append(PanelFact("throttled clock", percent(float(np.mean(throttled.values)))))
    return Drawn("lines", {"charts": charts}, tuple(facts))
