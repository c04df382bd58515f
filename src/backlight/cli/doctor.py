"""What works on this machine: one check per thing that backlight can use."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backlight.answer import Answer, Table, word
from backlight.distributed import world
from backlight.experiments.experiment import EXPERIMENTS
from backlight.monitor import MONITORS
from backlight.registry import RULES, PlugInWarning, Registry
from backlight.report.panel import PANELS
from backlight.session.trackers.base import TRACKERS
from backlight.store.filesystem import file_system_type, is_network_type
from backlight.store.write.database import SQLITE_VERSION

OLDEST_TORCH = (2, 9)
"""Oldest release of torch that can be watched."""

NEWEST_TORCH = (2, 15)
"""Newest release of torch that the tests have run with: see docs/compatibility.md."""

EXTRAS = {
    "live": "backlight open",
    "trace": "backlight profile and trace",
    "stalls": "native stacks of hung processes",
    "gpu": "counters of NVIDIA GPUs in watched runs",
    "parquet": "Parquet export, compact and compacted runs",
    "query": "backlight query",
    "mcp": "backlight mcp",
    "remote": "a run behind a URL",
    "frames": "to_pandas, to_polars",
    "plots": "backlight report --plots",
    "research": "backlight spectra, gram, sweep and grok; arrays of a run",
    "lightning": "Lightning",
    "huggingface": "Trainer and Accelerate",
    "ray": "Ray Train, --ray",
    "deepspeed": "engines of DeepSpeed",
    "tensorboard": "tracker", "wandb": "tracker", "mlflow": "tracker", "prometheus": "tracker",
}  # fmt: skip
"""What each extra enables; those for contributors are left out."""


@dataclass(frozen=True)
class Requirement:
    """One thing: ``state`` is ``ok``, ``limited``, ``missing`` or, of an extra, ``optional``."""

    what: str
    state: str
    found: str
    meaning: str
    required: bool = False


def examine() -> list[Requirement]:
    """Run every check; none raises, and torch is imported only where it is installed."""
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return [
        Requirement("Python", "ok", system, "", required=True),
        _torch(),
        _device(),
        _names(),
        _compiler(),
        Requirement("SQLite", "ok", SQLITE_VERSION, "run directories survive a kill"),
        _file_system(),
        _disk(),
        _ranks(),
        _cluster(),
        *_extras(),
        *_plug_ins(),
    ]


def is_usable(checks: Sequence[Requirement]) -> bool:
    """Return whether training scripts can be watched."""
    return not any(check.required and check.state == "missing" for check in checks)


def _torch() -> Requirement:
    version = _version("torch")
    if not version:
        meaning = "runs can be read, not recorded: pip install 'backlight[torch]'"
        return Requirement("torch", "missing", "not installed", meaning, required=True)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Requirement(
            "torch", "missing", version, f"expected {oldest} or newer: upgrade torch", required=True
        )
    if numbers > NEWEST_TORCH:
        meaning = f"newer than {'.'.join(map(str, NEWEST_TORCH))}, the newest that is tested"
        return Requirement("torch", "limited", version, meaning, required=True)
    return Requirement("torch", "ok", version, "training scripts can be watched", required=True)


def _device() -> Requirement:
    if importlib.util.find_spec("torch") is None:
        return Requirement("device", "limited", "no torch", "")
    import torch

    from backlight import devices

    if devices.is_available():
        names = ", ".join(devices.name_of(i) for i in range(devices.count()))
        return Requirement("device", "ok", names, "one asynchronous copy per recorded step")
    threads = f"CPU, {torch.get_num_threads()} threads"
    return Requirement("device", "ok", threads, "no accelerator: host measurements")


def _compiler() -> Requirement:
    if importlib.util.find_spec("torch") is None:
        return Requirement("C compiler", "limited", "no torch", "")
    from backlight.measure.stats.compiled_rows import c_compiler

    if not (compiler := c_compiler()):
        return Requirement("C compiler", "limited", "none", "long runs on the CPU: torch's operations")
    return Requirement("C compiler", "ok", Path(compiler[0]).name, "long runs on the CPU: one fused pass")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _extras() -> Iterator[Requirement]:
    requirements = [
        re.fullmatch(r"([\w.-]+).*; extra == ['\"](\w+)['\"]", line)
        for line in importlib.metadata.requires("backlight") or ()
    ]
    for extra, use in EXTRAS.items():
        packages = sorted({match[1] for match in requirements if match and match[2] == extra})
        missing = [package for package in packages if not _version(package)]
        state = f"no {', '.join(missing)}" if missing else "installed"
        yield Requirement(f"[{extra}]", "optional" if missing else "ok", state, use)


def _disk() -> Requirement:
    free = shutil.disk_usage(Path.cwd()).free
    state = "ok" if free > 10**9 else "limited"
    return Requirement(
        "disk", state, f"{free / 1e9:.1f} GB free here", "" if state == "ok" else "use --max-disk"
    )


def _file_system() -> Requirement:
    kind = file_system_type(Path.cwd()) or "unknown"
    safe = not is_network_type(kind)
    meaning = "runs are written in place" if safe else "runs appear in closed segments: see docs/clusters.md"
    return Requirement("file system", "ok" if safe else "limited", kind, meaning)


def _ranks() -> Requirement:
    """Check what starts several ranks, and what the environment says of this process."""
    if importlib.util.find_spec("torch") is None:
        return Requirement("ranks", "limited", "no torch", "")
    import torch.distributed as dist

    if not dist.is_available():
        return Requirement("ranks", "limited", "torch without distributed", "one process at a time")
    here = world()
    backends = [name for name in ("nccl", "gloo", "mpi") if getattr(dist, f"is_{name}_available")()]
    launchers = f"torchrun, {', '.join(backends) or 'no backend'}"
    if here.problem:
        return Requirement("ranks", "limited", launchers, f"{here.problem}: a process here is watched alone")
    return Requirement(
        "ranks", "ok", launchers, f"this is rank {here.rank} of {here.size}" if here.size > 1 else ""
    )


def _cluster() -> Requirement:
    sbatch = shutil.which("sbatch")
    state = "ok" if sbatch else "optional"  # most machines have none
    return Requirement(
        "Slurm", state, sbatch or "no sbatch", "backlight run --slurm-script FILE writes a script for it"
    )


def _names() -> Requirement:
    """Check the private names of torch that captures rely on; each has a fallback."""
    if importlib.util.find_spec("torch") is None:
        return Requirement("hooks", "limited", "no torch", "")
    from torch.nn.utils import clip_grad
    from torch.utils.data import dataloader

    wanted = {
        "clipping by norm": hasattr(clip_grad, "_clip_grads_with_norm_"),
        "clipping by value": hasattr(clip_grad, "_group_tensors_by_device_and_dtype"),
        "batches of a DataLoader": hasattr(dataloader, "_BaseDataLoaderIter"),
    }
    gone = [name for name, there in wanted.items() if not there]
    if gone:
        missing = f"not in this torch: {', '.join(gone)}"
        return Requirement("hooks", "limited", missing, "runs report them as not measured")
    return Requirement("hooks", "ok", f"{len(wanted)} private names of torch found", "")


def _plug_ins() -> Iterator[Requirement]:
    """Name what other distributions add; the registry itself warns of what is left out."""
    registries: tuple[Registry[Any], ...] = (MONITORS, RULES, EXPERIMENTS, PANELS, TRACKERS)
    for registry in registries:
        if not importlib.metadata.entry_points(group=registry.group):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlugInWarning)  # the table lists it
            plug_ins = registry.plug_ins()
        for plug_in in plug_ins:
            what = f"{plug_in.kind} {', '.join(plug_in.entries) or plug_in.name}"
            whose = f"{plug_in.distribution} {plug_in.version}".strip()
            meaning = f"left out: {plug_in.problem}" if plug_in.problem else "plug-in"
            yield Requirement(what, "limited" if plug_in.problem else "ok", whose, meaning)


def answer(checks: Sequence[Requirement]) -> Answer:
    """Return whether scripts can be watched, what works in part, and a table of everything."""
    by_name = {check.what: check for check in checks}
    missing = next((check for check in checks if check.required and check.state == "missing"), None)
    verdict = "" if missing is None else f"✕ {missing.what}: {missing.found}; {missing.meaning}"
    if missing is None:
        parts = (f"torch {by_name['torch'].found}", by_name["device"].found)
        verdict = f"✓ Training scripts can be watched here: {', '.join(parts)}."
    limited = (check for check in checks if check.state == "limited")
    facts = [f"{check.what}: {check.found}; {check.meaning}".rstrip("; ") for check in limited]
    optional = [check.what.strip("[]") for check in checks if check.state == "optional" and "[" in check.what]
    if optional:
        facts.append(f"Not installed: {', '.join(optional)}. pip install 'backlight[NAME]' adds one.")
    columns = (
        word("", "state"), word("what", "what", "text"), word("found", "found", "text"),
        word("what it means", "meaning", "text"),
    )  # fmt: skip
    return Answer(verdict, checks, tuple(facts), (Table(columns, checks, brief=len(checks)),))
