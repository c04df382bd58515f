"""Rule ``thread_oversubscription``: more threads compute on a machine than it has cores."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import CIRCUMSTANCES, circumstances, plural
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("thread_oversubscription", monitor="steptime", thresholds=("threads_per_core",))
def thread_oversubscription(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find ranks whose threads, with the workers of their loaders, outnumber the cores."""
    told = circumstances(run)
    if told is None:
        return
    facts = told.payload
    cores, threads = int(facts.get("cores") or 0), int(facts.get("threads") or 0)
    ranks, workers = int(facts.get("local_ranks") or 1), int(facts.get("workers") or 0)
    wanted = ranks * (threads + workers)
    if not cores or not threads or wanted <= limits.threads_per_core * cores:
        return
    rather = max(1, cores // ranks - workers)
    yield Finding(
        severity=Severity.WARNING,
        title=f"{plural(wanted, 'thread')} compete for {plural(cores, 'core')}",
        detail=(
            f"{plural(wanted, 'thread')} want {plural(cores, 'core')}: {plural(ranks, 'rank')} on this "
            "machine, "
            f"each with {plural(threads, 'thread')} of torch and {plural(workers, 'loader worker')}. Threads "
            "that "
            "wait spin, and take the cores from those that work. Expected gain: not known before it is "
            "tried; "
            f"on a CPU often a multiple."
        ),
        subject=Subject(rank=told.rank),
        evidence=(
            Evidence(f"events/{CIRCUMSTANCES}", told.step, f"threads {threads}, workers {workers}"),
            Evidence(f"events/{CIRCUMSTANCES}", told.step, f"cores {cores}, local ranks {ranks}"),
        ),
        fix=(f"Set OMP_NUM_THREADS={rather} (or torch.set_num_threads({rather})) and compare both runs."),
        refuted_if=f"the same training with {plural(rather, 'thread')} is not faster.",
    )
