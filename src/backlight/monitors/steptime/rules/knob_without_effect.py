"""Rule ``knob_without_effect``: an argument asked for something that the training does not have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import CIRCUMSTANCES, circumstances
from backlight.records import Evidence, Finding, Fingerprint, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

Seen = tuple[str, str] | None
"""What an argument asked for against what is there, in words; None where they agree or nothing is known."""


@rule("knob_without_effect", monitor="steptime")
def knob_without_effect(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find arguments whose effect would be on record, and is not.

    Only what a run records can be judged: threads, deterministic algorithms, TF32, the fused and foreach
    ways of an optimizer, compilation, workers of loaders. Whether any other knob moves anything is what
    `backlight compare --factor` says of two runs.
    """
    printed, told = run.fingerprint(), circumstances(run)
    if printed is None:
        return
    facts: Mapping[str, Any] = told.payload if told is not None else {}
    given = read_arguments(printed.arguments)
    for key, value in given.items():
        name = key.lstrip("-").rpartition(".")[2].lower().replace("-", "_")
        check = _CHECKS.get(name)
        found = check(value, printed, facts) if check is not None else None
        if found is None:
            continue
        where, is_there = found
        step = told.step if told is not None and where.startswith("events/") else None
        yield Finding(
            rule="knob_without_effect",
            severity=Severity.WARNING,
            claim=(
                f"The argument {key} asks for {value or 'what it says'}, and the training has {is_there}: "
                "the "
                "argument had no effect. Expected gain: what the argument was given for."
            ),
            subject=Subject(),
            evidence=(
                Evidence(where, step, is_there),
                Evidence("fingerprint/arguments", value=f"{key} {value}"),
            ),
            next_check=f"Follow {key} through the script: it is parsed and not used, or overwritten later.",
            refuted_if=f"{key} means something else in this script.",
        )


def read_arguments(tokens: tuple[str, ...]) -> dict[str, str]:
    """Read ``--name value``, ``--name=value``, ``name=value`` and ``--flag`` (as an empty value)."""
    read: dict[str, str] = {}
    name = ""
    for token in tokens:
        assigned = re.fullmatch(r"(-{0,2}[A-Za-z_][\w./-]*)=(.*)", token, re.DOTALL)
        if assigned:
            read[assigned[1]], name = assigned[2], ""
        elif token.startswith("--"):
            read[token], name = "", token
        elif name:
            read[name], name = token, ""
    return read


def _asked(value: str) -> bool | None:
    plain = value.lower()
    if plain in {"", "1", "true", "yes", "on"}:
        return True
    return False if plain in {"0", "false", "no", "off"} else None


def _flag(flag: str) -> Callable[[str, Fingerprint, Mapping[str, Any]], Seen]:
    def check(value: str, printed: Fingerprint, _facts: Mapping[str, Any]) -> Seen:
        asked, there = _asked(value), printed.flags.get(flag)
        if asked is None or there is None or str(asked) == there:
            return None
        return f"fingerprint/flags/{flag}", f"{flag} {'on' if there == 'True' else 'off'}"

    return check


def _threads(value: str, printed: Fingerprint, _facts: Mapping[str, Any]) -> Seen:
    there = printed.flags.get("threads")
    if there is None or not value.isdigit() or value == there:
        return None
    return "fingerprint/flags/threads", f"{there} threads"


def _way(way: str) -> Callable[[str, Fingerprint, Mapping[str, Any]], Seen]:
    def check(value: str, _printed: Fingerprint, facts: Mapping[str, Any]) -> Seen:
        groups = facts.get("optimizers") or []
        asked = _asked(value)
        if not groups or asked is None or any(bool(group.get(way)) == asked for group in groups):
            return None
        return f"events/{CIRCUMSTANCES}", f"{way} {'off' if asked else 'on'} in every optimizer"

    return check


def _compile(value: str, _printed: Fingerprint, facts: Mapping[str, Any]) -> Seen:
    compiled = facts.get("compilation")
    if compiled is None or _asked(value) is not True or compiled.get("graphs"):
        return None
    return f"events/{CIRCUMSTANCES}", "no compiled graph"


def _workers(value: str, _printed: Fingerprint, facts: Mapping[str, Any]) -> Seen:
    there = facts.get("workers")
    if there is None or not value.isdigit() or int(value) == int(there):
        return None
    return f"events/{CIRCUMSTANCES}", f"{there} workers"


_CHECKS: dict[str, Callable[[str, Fingerprint, Mapping[str, Any]], Seen]] = {
    "threads": _threads,
    "num_threads": _threads,
    "deterministic": _flag("deterministic"),
    "tf32": _flag("tf32"),
    "allow_tf32": _flag("tf32"),
    "fused": _way("fused"),
    "foreach": _way("foreach"),
    "compile": _compile,
    "torch_compile": _compile,
    "workers": _workers,
    "num_workers": _workers,
}
