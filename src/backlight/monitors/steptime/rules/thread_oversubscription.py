"""Rule ``thread_oversubscription``: more threads than cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import info_evidence, read_runtime_info
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count


@dataclass(frozen=True)
class ThreadOversubscriptionLimits(Limits, monitor="steptime"):
    """Limits of the rule ``thread_oversubscription``."""

    threads_per_core: float = limit(1.25, "threads that compute on one machine, over its cores", low=1.0)
    waited_share: float = limit(
        0.05, "share of the run that the training thread waited for a core, where that is counted", high=1.0
    )


@rule("thread_oversubscription", monitor="steptime", limits=ThreadOversubscriptionLimits)
def thread_oversubscription(run: Run, limits: ThreadOversubscriptionLimits) -> Iterator[Finding]:
    """Find ranks whose threads, with the workers of their loaders, outnumber the cores."""
    info = read_runtime_info(run)
    if info is None:
        return
    facts = info.payload
    cores, threads = int(facts.get("cores") or 0), int(facts.get("threads") or 0)
    ranks, workers = int(facts.get("local_ranks") or 1), int(facts.get("workers") or 0)
    wanted = ranks * (threads + workers)
    waited = facts.get("core_wait")
    if not cores or threads < 2 or wanted <= limits.threads_per_core * cores:
        return
    if waited is not None and float(waited) < limits.waited_share:
        return
    better = max(1, cores // ranks - workers)
    yield Finding(
        severity=Severity.INFO,
        title=f"{count(wanted, 'thread')} share {count(cores, 'core')}",
        detail=(
            f"{count(wanted, 'thread')} share {count(cores, 'core')}: {count(ranks, 'rank')} on this "
            f"machine, each with {count(threads, 'thread')} of torch and {count(workers, 'loader worker')}. "
            "Waiting threads spin and take cores from working ones. Expected gain: unknown until tried, "
            "often several-fold on a CPU."
        ),
        subject=Subject(rank=info.rank),
        evidence=(
            info_evidence(info, f"threads {threads}, workers {workers}"),
            info_evidence(info, f"cores {cores}, local ranks {ranks}"),
        ),
        fix=f"Set `OMP_NUM_THREADS={better}` (or `torch.set_num_threads({better})`) and compare both runs.",
        refuted_if=f"the same run with {count(better, 'thread')} is not faster.",
    )
