"""Commands of the group Diagnose that look at a script, a process, a recipe or a trace."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from backlight.cli.app import command
from backlight.cli.console import Page, make_console, print_json
from backlight.cli.options import Json, Module, Script, StoreIn
from backlight.cli.progress import count_bar
from backlight.records import to_json

if TYPE_CHECKING:
    from backlight.diagnose.missing_gradients.reasons import Row
    from backlight.user_code import SourceLine


@command("attach", "Diagnose")
def attach(
    pid: Annotated[int, Argument(metavar="PID", help="Process id.")],
    seconds: Annotated[float, Option(min=0.5, help="Observation time in seconds.")] = 2.0,
    native: Annotated[
        bool, Option("--native/--no-native", help="Take native stacks, which pauses the process briefly.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Diagnose a running process from outside.

    Reports all threads, Python and native, and what is not observable.
    """
    from backlight.monitors.stalls.model.attach import attach as look_into
    from backlight.monitors.stalls.model.stacks import format_sample

    found = look_into(pid, seconds, native=native)
    if as_json:
        print_json(found)
        return
    console = make_console(soft_wrap=True)
    console.print(found.diagnosis.claim)
    console.print(f"confidence {found.diagnosis.confidence}; refuted if {found.diagnosis.refuted_if}")
    console.print(f"next: {found.diagnosis.next_check}\n")
    console.print(found.threads)
    for sample in found.samples:
        console.print(format_sample(sample))
    for what in found.unseen:
        console.print(f"not observable: {what}")


def _explain(
    observer: AbstractContextManager[Any], script: str, context: Context, *, module: bool, quiet: bool
) -> int:
    """Run the script under the observer until it knows enough; return the script's exit code."""
    from backlight.launch.observe import explain
    from backlight.launch.script import check

    check(script, module=module)
    return explain(observer, script, list(context.args), module=module, quiet=quiet)


def _without_backward(script: str, code: int) -> ValueError:
    return ValueError(
        f"{script}: ended (exit code {code}) without a backward; expected a script that calls "
        "loss.backward() and is not stopped before"
    )


@command("checkpointing", "Diagnose", script=True)
def checkpointing(
    context: Context,
    script: Script,
    module: Module = False,
    steps: Annotated[int, Option(min=1, help="Optimizer steps before the script is ended.")] = 2,
    as_json: Json = False,
    fail: Annotated[bool, Option("--fail", help="Exit 1 if a region has remarks.")] = False,
) -> int:
    """Inspect activation checkpointing in a training script.

    For each region: its mode and line, in-place operations inside, state that differs between forward
    and recomputation, attention inputs that are not contiguous, and parameters that its boundary cuts.
    """
    from backlight.cli.render.explanations import print_regions, regions_as_json
    from backlight.diagnose.checkpointing.observer import CheckpointObserver
    from backlight.launch.observe import end_script

    observer = CheckpointObserver(steps, end_script)
    code = _explain(observer, script, context, module=module, quiet=as_json)
    if not observer.backwards and not observer.regions:
        raise _without_backward(script, code)
    if as_json:
        print_json(regions_as_json(observer, script, code))
    else:
        print_regions(Page(), observer, code)
    return int(fail and any(region.remarks for region in observer.regions))


@command("nan", "Diagnose", script=True)
def nan(
    context: Context,
    script: Script,
    module: Module = False,
    steps: Annotated[int | None, Option(min=1, help="Optimizer steps to check; default all.")] = None,
    as_json: Json = False,
    fail: Annotated[bool, Option("--fail", help="Exit 1 if an origin was found.")] = False,
) -> int:
    """Find the operation that produced the first NaN or infinity.

    Every operation is checked, which takes time but changes no number of the run. The script is ended once a
    loss, a gradient or a parameter is not finite.
    """
    from backlight.cli.render.explanations import origin_as_json, print_origin
    from backlight.diagnose.nan.tracer import NanTracer
    from backlight.launch.observe import end_script

    tracer = NanTracer(end_script, steps)
    code = _explain(tracer, script, context, module=module, quiet=as_json)
    if not tracer.backwards and tracer.found is None:
        raise _without_backward(script, code)
    if as_json:
        print_json(origin_as_json(tracer, script, code))
    else:
        print_origin(Page(), tracer, code)
    return int(fail and tracer.found is not None)


@command("why-no-grad", "Diagnose", script=True)
def why_no_grad(
    context: Context,
    script: Script,
    module: Module = False,
    steps: Annotated[int, Option(min=1, help="Optimizer steps before the script is ended.")] = 3,
    as_json: Json = False,
    fail: Annotated[bool, Option("--fail", help="Exit 1 if a parameter is not trained.")] = False,
) -> int:
    """Explain why parameters receive no gradient.

    What the graph of the first loss shows is printed before the first backward. The script is ended after a
    few steps; nothing is stored.
    """
    from backlight.cli.render.explanations import missing_as_json, print_missing, print_row
    from backlight.diagnose.missing_gradients.observer import MissingGradientObserver
    from backlight.launch.observe import end_script

    page = Page()
    printed: dict[str, str] = {}

    def early(rows: list[Row], line: SourceLine | None) -> None:
        if rows and not as_json:
            page.say((f"before the first backward ({line or 'line not known'}):", "bold"))
            for row in rows:
                print_row(page, row)
                printed[row.name] = row.reason.text if row.reason else ""

    observer = MissingGradientObserver(steps, end_script, early)
    code = _explain(observer, script, context, module=module, quiet=as_json)
    answer = observer.answer
    if not answer.backwards:
        raise _without_backward(script, code)
    if as_json:
        print_json(missing_as_json(answer, script, code))
    else:
        print_missing(page, answer, code, printed)
    return int(fail and bool(answer.rows or answer.failure))


@command("profile", "Diagnose", script=True)
def profile(
    context: Context,
    script: Script,
    module: Module = False,
    steps: Annotated[int, Option(min=1, help="Steps to time, the cold first one included.")] = 30,
    traced: Annotated[int, Option(min=0, help="Steps to trace after them; 0 for none.")] = 3,
    trace: Annotated[Path | None, Option(help="Trace file; default <script>-trace.json.gz.")] = None,
    stacks: Annotated[
        bool, Option("--stacks", help="Record whole stacks in the trace; slows traced steps.")
    ] = False,
    tokens: Annotated[
        int | None, Option("--tokens-per-step", min=1, help="Tokens of one step, over all ranks.")
    ] = None,
    peak: Annotated[
        float | None, Option("--peak-flops", min=1, help="Peak FLOP/s of one device, as 989e12.")
    ] = None,
    out: StoreIn = None,
    confirm: Annotated[
        bool, Option("--confirm", help="Test each suggestion: run with and without it.")
    ] = False,
    pairs: Annotated[int, Option(min=3, help="Pairs of runs for each suggestion of --confirm.")] = 5,
    as_json: Json = False,
) -> int:
    """Profile step time by phase, module and operator.

    The script is ended after its steps: some are timed by the clock alone, then a few under torch's profiler.
    """
    from backlight.cli.render.profile import show
    from backlight.launch.script import check

    check(script, module=module)
    from backlight.diagnose.profile.controls import run_controls
    from backlight.diagnose.profile.result import find_findings, profile_run, store_profile
    from backlight.diagnose.profile.run import ProfileOptions
    from backlight.diagnose.profile.run import profile as run

    where = trace or (None if out is not None else Path(f"{Path(script).stem}-trace.json.gz"))
    options = ProfileOptions(
        steps=steps, traced=traced, trace=where, keep=out is not None, stacks=stacks, tokens=tokens,
        peak=peak, quiet=as_json,
    )  # fmt: skip
    arguments = list(context.args)
    with profile_run(out, script, arguments) as writer:
        profiled = run(script, arguments, options, module=module)
        result = profiled.result
        if confirm:
            with count_bar("controls") as advance:
                controls = run_controls(profiled, options, module=module, pairs=pairs, progress=advance)
            result = result.model_copy(update={"controls": controls})
        if writer is not None:
            result = store_profile(replace(profiled, result=result), writer)
        found = find_findings(writer) if writer is not None and result.rank == 0 else []
    if not as_json:
        show(result, found)
        if out is not None:
            Page().note(f"{out}: backlight report {out}", "run")
    elif result.rank == 0:
        print_json({**result.model_dump(mode="json"), "findings": to_json(found)})
    return 0


@command("sweep", "Diagnose")
def sweep(
    recipe: Annotated[Path, Argument(metavar="RECIPE.py", help="Recipe file.")],
    chosen: Annotated[list[str], Option("--set", help="Setting with values, dim=512,768 (repeatable).")],
    steps: Annotated[int, Option(min=12, help="Timed steps at each size.")] = 30,
    fake: Annotated[bool, Option("--fake", help="Predict memory and operations on fake tensors.")] = False,
    limit: Annotated[float, Option(min=1, help="Time limit of a size in seconds.")] = 600.0,
    max_memory: Annotated[float | None, Option(min=0.1, help="Memory limit of a size in GiB.")] = None,
    at: Annotated[
        list[str] | None, Option(help="Setting to extrapolate to, NAME=VALUE (repeatable).")
    ] = None,
    as_json: Json = False,
) -> int:
    """Measure a recipe at several sizes and fit how it scales.

    Each size runs in its own process.
    """
    from backlight.cli.render.sweep import show
    from backlight.diagnose.scaling.sweep import parse_axes
    from backlight.diagnose.scaling.sweep import sweep as run
    from backlight.launch.recipe import parse_settings

    axes = parse_axes(chosen)
    memory = None if max_memory is None else int(max_memory * 2**30)
    wanted = parse_settings(at) if at else None
    with count_bar("sizes", quiet=as_json) as bar:
        found = run(
            recipe, axes, fake=fake, steps=steps, limit=limit, max_memory=memory, at=wanted, on_point=bar
        )
    if as_json:
        print_json(found)
    else:
        show(found)
    return 0


@command("trace", "Diagnose")
def trace(
    files: Annotated[
        list[Path],
        Argument(metavar="FILE...", help="Traces of torch.profiler (.json, .json.gz), one per rank."),
    ],
    step: Annotated[int | None, Option(help="Step to analyse, the N of ProfilerStep#N.")] = None,
    top: Annotated[int, Option(min=1, help="Rows of each table.")] = 12,
    as_json: Json = False,
    out: Annotated[Path | None, Option(help="File to write, .html or .md.")] = None,
    cache: Annotated[bool, Option("--cache", help="Keep events as Parquet next to each file.")] = False,
    workers: Annotated[
        int | None, Option(min=1, help="Decoding processes; default up to 4 for large files.")
    ] = None,
) -> int:
    """Analyse traces of torch.profiler.

    Reports steps, idle time and its causes, operators, copies and ranks.
    """
    from backlight.cli.render.trace import print_analysis, save_page
    from backlight.trace.analysis import analyse
    from backlight.trace.cache import open_trace
    from backlight.trace.reader import default_workers

    traces = [open_trace(f, cache=cache, workers=workers or default_workers(f)) for f in files]
    analysis = analyse(traces, step=step)
    if as_json:
        print_json({"unit": "ns", **to_json(analysis)})
    else:
        print_analysis(analysis, make_console(), top)
    if out is not None:
        save_page(analysis, out, top)
        print(f"written: {out}", file=sys.stderr)
    return 0
