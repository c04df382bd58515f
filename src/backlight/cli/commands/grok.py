"""``backlight grok``: experiments on grokking: their configurations, costs, runs, sweeps and diagnoses."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from backlight import codec
from backlight.answer import Answer, Table, word
from backlight.cli.app import command, grok
from backlight.cli.console import print_answer, print_json
from backlight.cli.options import (
    PATH,
    changes_option,
    json_option,
    preset_option,
    ray_option,
    readable_run,
    seed_option,
    slurm_option,
    slurm_script_option,
)
from backlight.extras import require
from backlight.terminal import make_console, write
from backlight.text import count

if TYPE_CHECKING:
    from backlight.experiments.config import Configuration


def overlay(changes: Sequence[str], seed: int | None = None) -> tuple[str, Mapping[str, Any]]:
    """Return what the options of a command line say, as a layer of a configuration."""
    from backlight.experiments.config import assigned

    return "--set", assigned(changes) | ({} if seed is None else {"seed": seed})


def configured(
    name: str | None, preset: str | None, config: Path | None, options: tuple[str, Mapping[str, Any]]
) -> Configuration:
    """Return the configuration of a preset, a file and options, the later ones winning."""
    from backlight.experiments.config import configure, read

    layers = [] if config is None else [(str(config), read(config))]
    return configure(name, preset, *layers, options)


@command("list", "backlight grok list", group=grok)
@json_option
def listing(*, as_json: bool) -> None:
    """List the experiments with their sources and effects."""
    from backlight.experiments.experiment import EXPERIMENTS

    rows = [
        {
            "name": name, "title": entry.title, "arxiv": entry.paper.arxiv, "paper": entry.paper.title,
            "claim": entry.paper.claim, "unclear": entry.paper.unclear, "effect": entry.effect,
            "expects": entry.expects, "ci_expects": entry.ci_expects,
        }
        for name, entry in EXPERIMENTS.items()
    ]  # fmt: skip
    columns = (
        word("name", "name"), word("experiment", "title", "text"), word("arXiv", "arxiv"),
        word("effect", "effect", "text"), word("expects", "expects"),
        word("ci", lambda row: row["ci_expects"] or None),
    )  # fmt: skip
    listed = Answer(
        count(len(rows), "experiment"), {"experiments": rows}, tables=(Table(columns, rows, len(rows)),)
    )
    print_answer(listed, as_json=as_json, full=True)


@command("detect", "backlight grok detect runs/nanda-ci-seed-0", group=grok)
@click.argument(
    "runs", nargs=-1, required=True, type=readable_run, metavar="RUN...", help="Run directories or URLs."
)
@json_option
@click.option(
    "--control-run",
    multiple=True,
    type=readable_run,
    metavar="RUN",
    help="Run directory of a matched control (repeatable).",
)
@click.option("--chance", metavar="X", type=float, help="Accuracy of guessing; default as recorded.")
@click.option("--test-size", metavar="N", type=int, help="Number of test samples; default as recorded.")
def detect(
    *,
    runs: Sequence[Path],
    as_json: bool,
    control_run: Sequence[Path],
    chance: float | None,
    test_size: int | None,
) -> int:
    """Diagnose grokking in stored runs.

    Controls and other seeds are found among the given runs and in directories next to each. Exit code 2 if a
    run cannot be evaluated; the others are.
    """
    from backlight.monitors.grokking.model.analysis import analyse, answer, neighbours
    from backlight.monitors.grokking.model.curves import DetectionError
    from backlight.store.read.run import open_run

    opened = [open_run(path) for path in runs]
    against = [open_run(path) for path in control_run]
    out, failed = [], False
    for run in opened:
        try:
            analysis = analyse(
                run, [*opened, *neighbours(run.path)], controls=against, chance=chance, test_size=test_size
            )
        except DetectionError as error:
            failed = True
            out.append({"run": run.location, "error": str(error)})
            write(f"backlight: {error}", file=sys.stderr)
            continue
        reply = answer(analysis)
        out.append(reply.as_json())
        if not as_json:
            print_answer(reply, as_json=False, full=True)
    if as_json:
        print_json(out)
    return 2 if failed else 0


# ``backlight grok run``: run an experiment or a sweep of it, here or on a cluster; continue one.


@command(
    "run", "backlight grok run nanda", "backlight grok run nanda --control random-labels",
    "backlight grok run nanda --preset paper --dry-run",
    "backlight grok run nanda --seeds 0-4 --sweep training.lr=0.001,0.003",
    group=grok,
)  # fmt: skip
@click.argument("name", required=False, metavar="[NAME]", help="Experiment, see backlight grok list.")
@preset_option
@click.option(
    "--config", type=PATH, metavar="FILE", help="YAML file, as backlight grok run --dry-run prints it."
)
@changes_option
@seed_option
@click.option("--out", "-o", type=PATH, metavar="DIR", help="Run directory; default runs/NAME-PRESET-seed-N.")
@click.option("--resume", is_flag=True, help="Resume the run in --out.")
@click.option("--control", metavar="NAME", help="Matched control to run as well: random-labels.")
@click.option("--degrade", is_flag=True, help="Record less, without asking, if not all fits.")
@click.option("--seeds", metavar="LIST", help="Seeds, one run each: 0-4 or 0,1,7.")
@click.option("--sweep", multiple=True, metavar="KEY=V,V", help="Key and values, one run each (repeatable).")
@click.option(
    "--jobs", metavar="N", type=click.IntRange(min=1), help="Concurrent processes; default: as cores allow."
)
@slurm_option
@slurm_script_option
@ray_option
@click.option("--dry-run", is_flag=True, help="Print the configuration, time a few steps, and run nothing.")
@click.option("as_json", "--json", is_flag=True, help="Print what --dry-run estimates as JSON.")
def run(
    *,
    name: str | None,
    preset: str | None,
    config: Path | None,
    changes: Sequence[str],
    seed: int | None,
    out: Path | None,
    resume: bool,
    control: str | None,
    degrade: bool,
    seeds: str | None,
    sweep: Sequence[str],
    jobs: int | None,
    slurm: Sequence[str],
    slurm_script: Path | None,
    ray: Sequence[str],
    dry_run: bool,
    as_json: bool,
) -> int:
    """Run an experiment into a run directory.

    With --resume, an interrupted run continues to the same numbers. backlight compares the cost with the
    free memory and disk before it starts. --dry-run prints the configuration as YAML, and on standard error
    the time, memory and disk that it takes.
    """
    require("yaml", "h5py")
    from backlight.experiments.config import check_control

    check_control(control or "")
    options = overlay(changes, seed)
    request = _Request(name, preset, config, options, out, control or "", degrade)
    if as_json and not dry_run:
        raise ValueError("--json prints what --dry-run estimates: add --dry-run")
    if dry_run:
        return _estimate(request, as_json=as_json)
    if ray and (slurm or slurm_script is not None):
        raise ValueError("--ray and --slurm: a sweep runs on one of them; give one")
    if ray and seeds is None and not sweep:
        raise ValueError("--ray: runs the members of a sweep; give --seeds or --sweep as well")
    if seeds is not None or sweep:
        return _sweep(request, seeds, sweep, jobs, slurm, slurm_script, ray)
    if slurm or slurm_script is not None:
        return _write_job(request, slurm, slurm_script, resume=resume)
    return _run_here(request, resume=resume)


@dataclass(frozen=True)
class _Request:
    """Request of the command line."""

    name: str | None
    preset: str | None
    config: Path | None
    options: tuple[str, Mapping[str, Any]]
    out: Path | None
    control: str
    degrade: bool

    def configuration(self) -> Configuration:
        """Return the configuration, without the control."""
        return configured(self.name, self.preset, self.config, self.options)

    def arguments(self) -> list[str]:
        """Return the command line of this run, without its directory."""
        line = [self.name] if self.name else []
        line += ["--preset", self.preset] if self.preset else []
        line += ["--config", str(self.config.absolute())] if self.config else []
        line += [part for key, value in _flat(self.options[1]) for part in ("--set", f"{key}={value}")]
        line += ["--control", self.control] if self.control else []
        return [*line, "--degrade"] if self.degrade else line


def _estimate(request: _Request, *, as_json: bool) -> int:
    """Print the configuration, and what it takes by timing a few steps and each measure."""
    from backlight.experiments.cost import estimate_of

    configuration = request.configuration()
    if not as_json:
        write(configuration.as_yaml().rstrip("\n"))
    console = make_console(stderr=True)
    with console.status("timing") as status:
        estimate = estimate_of(
            configuration, request.out or Path("runs"), on_part=lambda part: status.update(f"timing {part}")
        )
    print_answer(estimate.answer(), as_json=as_json, full=True, errors=True)
    return 0


def _run_here(request: _Request, *, resume: bool) -> int:
    """Run in this process, the run and then its control; return the exit code."""
    from backlight.experiments.runner import default_directory, finished, resumed

    if resume and request.out is not None and request.config is None:
        named = {"experiment": request.name, "preset": request.preset}
        requested = {key: value for key, value in named.items() if value is not None}
        configuration = resumed(request.out, ("the command line", {**request.options[1], **requested}))
    else:
        configuration = request.configuration()
    path = request.out if request.out is not None else default_directory(configuration)
    if not request.control:
        return _run_experiment(configuration, path, resume=resume, degrade=request.degrade)
    if not finished(path):
        code = _run_experiment(configuration, path, resume=resume, degrade=request.degrade)
        if code:
            return code
    control_path = path.with_name(f"{path.name}-{request.control}")
    control = dataclasses.replace(configuration, control=request.control)
    again = resume and (control_path / "manifest.json").exists()
    return _run_experiment(control, control_path, resume=again, degrade=request.degrade, control_of=path.name)


def _run_experiment(
    configuration: Configuration, path: Path, *, resume: bool, degrade: bool, control_of: str = ""
) -> int:
    from backlight.cli.console import Bar
    from backlight.experiments.cost import Choice, choose, estimate_of
    from backlight.experiments.runner import degradations, refuse_existing, run_experiment, tier_of

    if resume:
        choice = Choice(tier_of(path)) if (path / "manifest.json").exists() else Choice()
    else:
        refuse_existing(path)
        asking = (lambda text: click.confirm(text, err=True)) if sys.stdin.isatty() else None
        choice = choose(estimate_of(configuration, path, budget=0.2), degrade=degrade, ask=asking)
    bar = Bar(f"{configuration.experiment}{' ' + configuration.control if configuration.control else ''}")
    if choice.reason:
        bar.warn(f"{choice.reason}; the run keeps {choice.tier}")
    try:
        with bar as show:
            run_experiment(
                configuration, path, resume=resume, tier=choice.tier, reason=choice.reason,
                control_of=control_of, on_progress=show, on_warning=bar.warn,
            )  # fmt: skip
    except KeyboardInterrupt:
        write(f"stopped; continue with: backlight grok run --out {path} --resume", file=sys.stderr)
        return 130
    write(path)
    for change in degradations(path):
        write(f"stored {change}")
    return 0


def _sweep(
    request: _Request, seeds: str | None, sweeps: Sequence[str], jobs: int | None,
    slurm: Sequence[str], script: Path | None, ray: Sequence[str],
) -> int:  # fmt: skip
    """Run one process for each member of a sweep; return the exit code."""
    from backlight.experiments.runner import degradations, finished
    from backlight.experiments.sweep import command, concurrent_runs, members, run_all, run_on_ray
    from backlight.experiments.sweep import seeds as seeds_of
    from backlight.launch.ray_tasks import RayOptions

    configuration = request.configuration()
    root = request.out if request.out is not None else Path("runs") / f"{configuration.experiment}-sweep"
    if ray:
        root = root.absolute()  # tasks have a working directory of their own
    all_members = members(root, [] if seeds is None else seeds_of(seeds), sweeps)
    for member in all_members:
        pairs = zip(member.options[::2], member.options[1::2], strict=True)
        _, values = overlay([option for flag, option in pairs if flag == "--set"])
        configured(configuration.experiment, None, request.config, ("--sweep", values))
    left = [member for member in all_members if not finished(member.directory)]
    commands = []
    for member in left:
        resumed = ["--resume"] if (member.directory / "manifest.json").exists() else []
        commands.append((member.directory, [*command(request.arguments(), member), *resumed]))
    if slurm or script is not None:
        return _write_jobs(request, configuration, [line for _, line in commands], root, slurm, script)
    threads = configuration.run.threads

    def show(folder: Path, code: int) -> None:
        write(folder if not code else f"{folder}: failed, see {folder}.log")
        for change in [] if code else degradations(folder):
            write(f"{folder}: stored {change}")

    if ray:
        gpus = float(configuration.device.startswith("cuda"))
        failed = run_on_ray(
            commands, RayOptions.of(ray, cpus=threads, gpus=gpus), threads=threads, on_end=show
        )
    else:
        concurrent = concurrent_runs(jobs, len(commands), threads)
        failed = run_all(commands, concurrent=concurrent, threads=threads, on_end=show)
    for member in all_members:
        if member not in left:
            write(f"{member.directory} (was finished)")
    return 2 if failed else 0


def _write_job(request: _Request, slurm: Sequence[str], script: Path | None, *, resume: bool) -> int:
    """Write the batch script of a run; return the exit code."""
    from backlight.experiments.runner import default_directory
    from backlight.experiments.sweep import Member, command

    configuration = request.configuration()
    path = request.out if request.out is not None else default_directory(configuration)
    line = [*command(request.arguments(), Member(path, ())), *(["--resume"] if resume else [])]
    return _write_jobs(request, configuration, [line], path.parent, slurm, script)


def _write_jobs(
    request: _Request, configuration: Configuration, commands: list[list[str]], root: Path,
    slurm: Sequence[str], script: Path | None,
) -> int:  # fmt: skip
    from backlight.experiments.sweep import batch_script, job_parameters
    from backlight.launch.slurm import parameters, script_for, write_script

    script = script_for(script)
    job_options, note = job_parameters(parameters(slurm), configuration, root, degrade=request.degrade)
    if note:
        write(f"backlight: {note}", file=sys.stderr)
    logs = root / "slurm"
    write_script(script, batch_script(job_options, commands, logs), logs)
    write(script)
    return 0


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", codec.encode(value)
