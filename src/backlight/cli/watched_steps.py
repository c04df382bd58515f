"""The steps of a script that ``backlight check --steps`` trains, watched next to its probes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from backlight.cli.options import parse_fail_on
from backlight.findings.evaluate import FindingNameError, findings_of, named_findings
from backlight.records import Finding, Severity
from backlight.registry import RULES
from backlight.store.read.run import Run, open_run
from backlight.text import did_you_mean

if TYPE_CHECKING:
    from backlight.diagnose.probes.observer import ProbeObserver
    from backlight.session.watch import Watch

ANY = "any"


class WatchedSteps:
    """Context manager around a script: ``observer``, and around it the default monitors and activations.

    The run is in ``out``, or until :meth:`close` in a temporary directory.
    """

    def __init__(
        self,
        observer: ProbeObserver,
        script: str,
        arguments: Sequence[str],
        out: Path | None,
        reading: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._observer, self._script, self._arguments = observer, script, tuple(arguments)
        self._temporary = ExitStack()
        self._out, self._reading = out, reading
        self._entered = ExitStack()
        self._watch: Watch | None = None

    def __enter__(self) -> Self:
        """Open the run and attach."""
        from backlight.session.settings import Settings
        from backlight.session.watch import Watch

        out = self._out
        if out is None:
            folder = tempfile.TemporaryDirectory(prefix="backlight-check-", ignore_cleanup_errors=True)
            out = Path(self._temporary.enter_context(folder)) / Path(self._script).stem
        steps = {"every": 1, "monitors": "+activations", "activations": {"every": 1}}
        settings = Settings.of({**steps, "quiet": True})
        self._watch = Watch((), (), settings, out, script=self._script, arguments=self._arguments)
        self._watch.reading = self._reading
        self._entered.enter_context(self._watch)
        self._entered.enter_context(self._observer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Detach and close the run; an exception passes through."""
        self._entered.__exit__(kind, error, traceback)

    def result(self) -> tuple[Run, list[Finding]] | None:
        """Return the run and its findings; None where no step was recorded."""
        if self._watch is None or not self._watch.is_recorded or not self._watch.step:
            self._observer.notes.append("no optimizer step was recorded, so that no rule was evaluated")
            return None
        run = open_run(self._watch.path)
        return run, findings_of(run, fresh=self._watch.final_findings)

    def close(self) -> None:
        """Remove a temporary run."""
        self._temporary.close()


def split_fail_on(
    text: str | None, probes: Sequence[str], *, watches: bool
) -> tuple[frozenset[str], Callable[[Finding], bool] | None]:
    """Return the probes that ``--fail-on`` of ``check`` names, and a predicate of the findings that it names.

    ``any`` is every probe, and each error or warning of watched steps.

    Raises
    ------
    ValueError
        If a name is neither a probe nor a severity or rule, or names findings where no steps are watched.
    """
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    choices = [ANY, *probes, *Severity, *RULES]
    for name in names:
        if name not in choices:
            problem = f"no such name as {name!r}{did_you_mean(name, choices)}"
            raise FindingNameError("--fail-on", problem)
    of_probes = [name for name in names if name in {ANY, *probes}]
    of_findings = ["warning" if name == ANY else name for name in names if name not in probes]
    if not watches and (named := [name for name in names if name not in {ANY, *probes}]):
        problem = f"{named[0]!r} names findings, which need watched steps; add --steps"
        raise FindingNameError("--fail-on", problem)
    predicate = named_findings(of_findings, "--fail-on") if of_findings and watches else None
    return parse_fail_on(",".join(of_probes) if of_probes else None, probes), predicate
