"""Commands of the group Diagnose: one question about a script, a process, a recipe or a trace."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from backlight.cli.app import command
from backlight.cli.console import Page, count_bar, print_answer
from backlight.cli.options import (
    PATH,
    Annotation,
    format_option,
    json_option,
    module_option,
    parse_fail_on,
    readable_run,
    script_argument,
    script_json_option,
    store_option,
    tables_option,
)
from backlight.terminal import make_console, write

if TYPE_CHECKING:
    from backlight.diagnose.missing_gradients.reasons import ParameterState
    from backlight.user_code import SourceLine

REGION_STEPS = 2
"""Optimizer steps after which the inspection of checkpointed regions ends the script."""

FAILED = "failed backward"
"""In ``why-no-grad --fail-on``: an in-place operation broke the backward pass."""


def _explain(
    observer: AbstractContextManager[Any], script: str, context: click.Context, *, module: bool, quiet: bool
) -> int:
    """Run the script under the observer until it knows enough; return the script's exit code."""
    from backlight.launch.observe import explain
    from backlight.launch.script import check

    check(script, module=module)
    return explain(observer, script, list(context.args), module=module, quiet=quiet)


def _without_backward(script: str, code: int) -> Exception:
    from backlight.launch.script import NoTrainingError

    message = (
        f"{script}: finished (exit code {code}) without calling loss.backward(); expected a "
        "script that trains and is not stopped before"
    )
    return NoTrainingError(message, code)


@command(
    "check", "backlight check train.py", "backlight check --causal --fail-on any train.py",
    "backlight check --steps 20 --fail-on error train.py",
    "backlight check --recompute --fail-on state,random train.py",
    script=True,
)  # fmt: skip
@script_argument
@module_option
@click.option(
    "--causal", is_flag=True, help="Probe for inputs from the future, and targets among the inputs."
)
@click.option("--through-time", is_flag=True, help="Probe the gradient from the last position to the first.")
@click.option(
    "samples", "--mixed-samples", is_flag=True, help="Probe whether an output depends on another sample."
)
@click.option(
    "one_batch", "--overfit-one-batch", is_flag=True, help="Train on one batch, also with shuffled labels."
)
@click.option("--recompute", is_flag=True, help="Compare checkpointed regions with their recomputation.")
@click.option(
    "--steps",
    metavar="N",
    type=click.IntRange(min=1),
    help="Optimizer steps to train under the default monitors; default: none.",
)
@click.option(
    "--against",
    multiple=True,
    type=readable_run,
    metavar="GOOD",
    help="Good run that the first steps are checked against (repeatable).",
)
@store_option
@script_json_option
@click.option(
    "--fail-on",
    metavar="NAME,...",
    help="Exit 1 for these probes, rules, severities or any; default: probes.",
)
@format_option
@click.pass_context
def check_script(
    context: click.Context,
    *,
    script: str,
    module: bool,
    causal: bool,
    through_time: bool,
    samples: bool,
    one_batch: bool,
    recompute: bool,
    steps: int | None,
    against: Sequence[Path],
    out: Path | None,
    as_json: bool,
    fail_on: str | None,
    annotation: Annotation | None,
) -> int:
    """Read a script for mistakes, and probe whether its model can learn.

    Reads the script and its local modules first, without importing them: what looks wrong is a hint, and 10
    steps are watched then, whose findings confirm or withdraw it. Replays the first step in a forked process
    before its backward, so that the script keeps its state. Runs every probe except --causal (does an output
    depend on later inputs?), or the probes that are named. With --steps N, the script then trains N steps,
    and the findings are printed as well. --against GOOD watches 10 steps, or N, and checks what held in a
    run that is known to be good, as `backlight compare --against` does. --recompute alone lets the script
    train two steps and prints for each checkpointed region its mode and line, in-place operations, state that
    differs between forward and recomputation, attention inputs that are not contiguous, and parameters that
    its boundary cuts.
    """
    from backlight.cli.watched_steps import WatchedSteps, split_fail_on
    from backlight.diagnose.explanations import probes_answer
    from backlight.diagnose.probes.hints import STEPS, ReachedLines, settle
    from backlight.diagnose.probes.observer import ProbeObserver
    from backlight.diagnose.probes.result import Probe
    from backlight.findings.accepted import accepted_probes
    from backlight.launch.observe import end_script
    from backlight.launch.reading.script_files import read_script

    if as_json and annotation is not None:
        raise click.BadParameter("--json and --format exclude one another")
    if (
        recompute
        and steps is None
        and out is None
        and not against
        and not (causal or through_time or samples or one_batch)
    ):
        return _regions(context, script, fail_on, module=module, as_json=as_json)
    failing, finding_fails = split_fail_on(fail_on, list(Probe), watches=steps is not None)
    hints = read_script(script, module=module)
    is_asked = steps is not None
    if steps is None and out is not None and not against:
        raise click.BadParameter("--out stores the steps that --steps asks for: add --steps")
    chosen = {
        Probe.FUTURE: causal, Probe.TARGETS: causal, Probe.THROUGH_TIME: through_time,
        Probe.SAMPLES: samples,
        Probe.OVERFIT: one_batch, Probe.LABELS: one_batch, Probe.RECOMPUTATION: recompute,
    }  # fmt: skip
    probes = {probe for probe, is_chosen in chosen.items() if is_chosen}
    if not probes:
        probes = set(Probe) - {Probe.FUTURE, Probe.TARGETS}
    if (hints or against) and steps is None:
        steps = STEPS
    observer = ProbeObserver(frozenset(probes), steps, end_script)
    watched = (
        None
        if steps is None
        else WatchedSteps(observer, script, context.args, out, [hint.as_event() for hint in hints])
    )
    with contextlib.closing(watched) if watched is not None else nullcontext():
        reached = ReachedLines(hints)
        is_quiet = as_json or annotation is not None
        with reached:
            code = _explain(watched or observer, script, context, module=module, quiet=is_quiet)
        if not observer.backwards:
            raise _without_backward(script, code)
        recorded = None if watched is None else watched.result()
        listed = None if recorded is None else recorded[1]
        settled = settle(hints, listed, reached, observer.steps)
        accepting = accepted_probes()
        observer.results = [
            replace(each, accepted=accepting.get(each.probe, "")) if each.fails else each
            for each in observer.results
        ]
        reference = None
        if against and recorded is not None:
            from backlight.analysis.reference import answer as reference_answer
            from backlight.analysis.reference import compare_with
            from backlight.store.read.run import open_run

            reference = compare_with([open_run(path) for path in against], recorded[0])
        contradicted = None if reference is None else [fact.text for fact in reference.contradicted]
        failing = frozenset(Probe) if fail_on is None else failing
        if annotation is not None:
            from backlight.diagnose.probes.annotations import probe_annotations
            from backlight.report.annotations import render, run_annotations

            fails = finding_fails or (lambda _: False)
            steps_watched = None if recorded is None else run_annotations(*recorded, fails)
            annotations = probe_annotations(
                observer, script, settled, failing, steps_watched, contradicted or ()
            )
            write(render(annotation, annotations))
        else:
            answer = probes_answer(observer, script, code, listed if as_json else None, settled, contradicted)
            print_answer(answer, as_json=as_json, full=True)
            if reference is not None and not as_json:
                print_answer(reference_answer(reference), as_json=False, full=False)
        if recorded is not None and not is_quiet and (is_asked or listed):
            from backlight.report.terminal import print_findings

            print_findings(*recorded, make_console())
    if any(result.fails and result.probe in failing for result in observer.results):
        return 1
    if against and (contradicted is None or contradicted):
        return 1
    if finding_fails is not None and (recorded is None or any(map(finding_fails, recorded[1]))):
        return 1  # not measured is not healthy
    return code if is_asked else 0


def _regions(context: click.Context, script: str, fail_on: str | None, *, module: bool, as_json: bool) -> int:
    """Inspect the checkpointed regions of a script; return the exit code."""
    from backlight.diagnose.checkpointing.observer import REMARK_KINDS, CheckpointObserver
    from backlight.diagnose.explanations import regions_answer
    from backlight.launch.observe import end_script

    failing = parse_fail_on(fail_on, REMARK_KINDS)
    observer = CheckpointObserver(REGION_STEPS, end_script)
    code = _explain(observer, script, context, module=module, quiet=as_json)
    if not observer.backwards and not observer.regions:
        raise _without_backward(script, code)
    print_answer(regions_answer(observer, script, code), as_json=as_json, full=True)
    return int(any(remark.kind in failing for region in observer.regions for remark in region.remarks))


@command("nan", "backlight nan train.py", "backlight nan --steps 500 --fail-on any train.py", script=True)
@script_argument
@module_option
@click.option(
    "--steps",
    metavar="N",
    type=click.IntRange(min=1),
    help="Optimizer steps after which the script is ended; default: never.",
)
@script_json_option
@click.option("--fail-on", metavar="KIND,...", help="Exit 1 for an origin: nan, infinity or any.")
@click.pass_context
def nan(
    context: click.Context,
    *,
    script: str,
    module: bool,
    steps: int | None,
    as_json: bool,
    fail_on: str | None,
) -> int:
    """Find the operation that produced the first NaN or infinity.

    Every operation is checked, which takes time but changes no number of the run. The script is ended once a
    loss, a gradient or a parameter is not finite.
    """
    from backlight.diagnose.explanations import nan_answer
    from backlight.diagnose.nan.tracer import NanTracer
    from backlight.launch.observe import end_script

    failing = parse_fail_on(fail_on, ("nan", "infinity"))
    tracer = NanTracer(end_script, steps)
    code = _explain(tracer, script, context, module=module, quiet=as_json)
    if not tracer.backwards and tracer.origin is None:
        raise _without_backward(script, code)
    print_answer(nan_answer(tracer, script, code), as_json=as_json, full=True)
    return int(tracer.origin is not None and tracer.origin.value.lower() in failing)


@command(
    "why-no-grad", "backlight why-no-grad train.py", "backlight why-no-grad --fail-on unused,cut train.py",
    script=True,
)  # fmt: skip
@script_argument
@module_option
@click.option(
    "--steps",
    default=3,
    metavar="N",
    type=click.IntRange(min=1),
    help="Optimizer steps after which the script is ended.",
)
@script_json_option
@click.option("--fail-on", metavar="CAUSE,...", help="Exit 1 for parameters of these causes, or any.")
@click.pass_context
def why_no_grad(
    context: click.Context, *, script: str, module: bool, steps: int, as_json: bool, fail_on: str | None
) -> int:
    """Explain why parameters receive no gradient.

    Prints what the graph of the first loss shows before the first backward. Ends the script after a few
    steps, and stores nothing.
    """
    from backlight.diagnose.explanations import missing_answer, parameter_lines
    from backlight.diagnose.missing_gradients.observer import MissingGradientObserver
    from backlight.diagnose.missing_gradients.reasons import MissingCause
    from backlight.launch.observe import end_script

    failing = parse_fail_on(fail_on, [*MissingCause, FAILED])
    page = Page()
    printed: dict[str, str] = {}

    def early(rows: list[ParameterState], line: SourceLine | None) -> None:
        if rows and not as_json:
            page.say((f"before the first backward ({line or 'line not known'}):", "bold"))
            for text in parameter_lines(rows):
                page.sentence(f"  {text}", indent=4)
            printed.update((row.name, row.reason.text if row.reason else "") for row in rows)

    observer = MissingGradientObserver(steps, end_script, early)
    code = _explain(observer, script, context, module=module, quiet=as_json)
    answer = observer.answer
    if not answer.backwards:
        raise _without_backward(script, code)
    print_answer(missing_answer(answer, script, code, printed), as_json=as_json, full=True)
    causes = {row.reason.cause.value for row in answer.rows if row.reason is not None}
    return int(bool(failing & causes) or (answer.failure is not None and FAILED in failing))


@command(
    "profile", "backlight profile train.py", "backlight profile --timed 60 -o runs/profile train.py",
    "backlight profile --confirm train.py",
    script=True,
)  # fmt: skip
@script_argument
@module_option
@click.option(
    "--timed",
    default=30,
    metavar="N",
    type=click.IntRange(min=1),
    help="Steps to time, the cold first one included.",
)
@click.option(
    "--traced",
    default=10,
    metavar="N",
    type=click.IntRange(min=0),
    help="Steps to trace after them; 0 for none.",
)
@click.option("--trace-file", type=PATH, metavar="FILE", help="Trace to write; default: none, or in --out.")
@click.option(
    "--flame-graph", type=PATH, metavar="FILE", help="Flame graph of the lines to write, for speedscope.app."
)
@click.option("--stacks", is_flag=True, help="Record whole stacks in the trace; slows traced steps.")
@click.option(
    "tokens",
    "--tokens-per-step",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens of one step, over all ranks.",
)
@click.option(
    "peak",
    "--peak-flops",
    type=click.FloatRange(min=1),
    metavar="X",
    help="Peak FLOP/s of one device, as 989e12.",
)
@store_option
@click.option("--confirm", is_flag=True, help="Test each suggestion: run with and without it.")
@click.option(
    "--pairs",
    default=5,
    metavar="N",
    type=click.IntRange(min=3),
    help="Pairs of runs for each suggestion of --confirm.",
)
@tables_option
@script_json_option
@click.pass_context
def profile(
    context: click.Context,
    *,
    script: str,
    module: bool,
    timed: int,
    traced: int,
    trace_file: Path | None,
    flame_graph: Path | None,
    stacks: bool,
    tokens: int | None,
    peak: float | None,
    out: Path | None,
    confirm: bool,
    pairs: int,
    full: bool,
    as_json: bool,
) -> int:
    """Profile step time by phase, line, module and operator.

    The script is ended after its steps: some are timed by the clock alone, then a few under torch's profiler.
    """
    from backlight.launch.script import check

    check(script, module=module)
    from backlight.diagnose.profile.answer import answer
    from backlight.diagnose.profile.controls import run_controls
    from backlight.diagnose.profile.result import find_findings, profile_run, store_profile
    from backlight.diagnose.profile.run import ProfileOptions
    from backlight.diagnose.profile.run import profile as run

    options = ProfileOptions(
        steps=timed, traced=traced, trace=trace_file, keep=out is not None, stacks=stacks, tokens=tokens,
        peak=peak, flame_graph=flame_graph, quiet=as_json,
    )  # fmt: skip
    arguments = list(context.args)
    with profile_run(out, script, arguments) as writer:
        profiled = run(script, arguments, options, module=module)
        result = profiled.result
        if confirm:
            with count_bar("controls") as advance:
                controls = run_controls(profiled, options, module=module, pairs=pairs, progress=advance)
            result = replace(result, controls=controls)
        if writer is not None:
            result = store_profile(replace(profiled, result=result), writer)
        findings = find_findings(writer) if writer is not None and result.rank == 0 else []
    if result.rank == 0 or not as_json:
        print_answer(answer(result, findings), as_json=as_json, full=full, before="the script")
    if out is not None and not as_json:
        Page().note(f"{out}: backlight report {out}", "run")
    return 0


@command("trace", "backlight trace trace.json.gz", "backlight trace rank0.json rank1.json -o trace.html")
@click.argument(
    "files",
    nargs=-1,
    required=True,
    type=PATH,
    metavar="FILE...",
    help="Traces of torch.profiler (.json, .json.gz), one per rank.",
)
@click.option("--step", metavar="N", type=int, help="Step to analyse, the N of ProfilerStep#N.")
@click.option(
    "--rows", default=12, metavar="N", type=click.IntRange(min=1), help="Maximum rows of a printed table."
)
@json_option
@click.option("--out", "-o", type=PATH, metavar="FILE", help="File to write, .html or .md.")
@tables_option
@click.option("--against", type=PATH, metavar="FILE", help="Second trace; print what changed, per step.")
@click.option("--overlay", type=PATH, metavar="FILE", help="Trace to write with critical path and counters.")
@click.option("--cache", is_flag=True, help="Keep events as Parquet next to each file.")
def trace(
    *,
    files: Sequence[Path],
    step: int | None,
    rows: int,
    as_json: bool,
    out: Path | None,
    full: bool,
    against: Path | None,
    overlay: Path | None,
    cache: bool,
) -> int:
    """Analyse traces of torch.profiler.

    Reports steps, idle time and its causes, operators, copies and ranks.
    """
    from backlight.report.overlay import write_answer
    from backlight.trace.analysis import analyse, analyse_rank
    from backlight.trace.answer import answer, diff_answer
    from backlight.trace.cache import open_trace
    from backlight.trace.events import TraceError
    from backlight.trace.perfetto import save_overlay
    from backlight.trace.timeline import Timeline
    from backlight.trace.trace_diff import diff

    if len(files) > 1 and (against is not None or overlay is not None):
        raise TraceError(f"--against and --overlay: expected one trace before them, got {len(files)}")
    if against is not None:
        files = [*files, against]
    traces = [open_trace(f, cache=cache) for f in files]
    if overlay is not None:
        added = save_overlay(Timeline(traces[0]), overlay, step)
        write(f"written: {overlay} ({added:,} events added)", file=sys.stderr)
    if against is not None:
        difference = diff(
            *(analyse_rank(Timeline(trace_of_run), step, usual=True) for trace_of_run in traces)
        )
        reply, full = diff_answer(difference), True
    else:
        reply = answer(analyse(traces, step=step))
    print_answer(reply, as_json=as_json, full=full, rows=rows)
    if out is not None:
        write(f"written: {write_answer(reply, 'Trace', out)}", file=sys.stderr)
    return 0
