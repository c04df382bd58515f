"""Records and enumerations that all layers share: frozen, without torch.

Nothing here computes. :mod:`backlight.codec` turns records into JSON and back.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from backlight.text import html_of

OTHERS = "other ranks"
"""What a process does not observe if it could not join the others."""

FROM_HERE_ON = " from here on"
"""Ending of what a process does not record any more."""

EVERYTHING = f"everything{FROM_HERE_ON}"
"""What a process does not record after an error of backlight that concerns no single monitor."""

UNMEASURED = "unmeasured"
"""Kind of the events about what was not measured, with the reason; ``lost`` where that was not meant."""


class Severity(enum.StrEnum):
    """Severity of a finding; ordered, so that ``severity >= error`` has a meaning."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """Position in the order info < warning < error."""
        return list(Severity).index(self)


class FindingKind(enum.StrEnum):
    """Basis of a finding: an observed fact, a statistic with limits; or a hint, advice for a sound run."""

    FACT = "fact"
    STATISTIC = "statistic"
    HINT = "hint"


class Phase(enum.StrEnum):
    """Activity of a training process; every moment of a step belongs to exactly one."""

    DATA = "data"
    HOST_TO_DEVICE = "host_to_device"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    OTHER = "other"


class DiagnosisKind(enum.StrEnum):
    """Diagnosis of a process that makes no progress, or of a case in a test matrix."""

    PASS = "PASS"
    SLOW = "SLOW"
    BLOCKED = "BLOCKED"
    SPIN = "SPIN"
    LONG_OP = "LONG_OP"
    PHASE = "PHASE"
    DEAD = "DEAD"
    STOPPED = "STOPPED"
    MISMATCH = "MISMATCH"
    CRASH = "CRASH"
    DID_NOT_FINISH = "DID_NOT_FINISH"
    UNKNOWN = "UNKNOWN"


class Made(enum.StrEnum):
    """Who made a finding: the watched process while it ran, or a later reader of the run."""

    LIVE = "live"
    READER = "reader"


class Layout(enum.StrEnum):
    """Relation of the local tensor of one rank to the whole parameter."""

    WHOLE = "whole"
    SHARD = "shard"
    REPLICATE = "replicate"
    PARTIAL = "partial"


class RunStatus(enum.StrEnum):
    """Status of an attempt, as far as the run directory shows it."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Placement:
    """Position of the local part of a parameter in the whole, without any torch type.

    ``offset`` and ``global_shape`` are in elements per dimension. ``replicas`` counts the ranks
    that hold the same values, so that a reader counts them once.
    """

    layout: Layout = Layout.WHOLE
    global_shape: tuple[int, ...] = ()
    local_shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """One row of a parameter table: position in the table is position on the axis of a series.

    ``aliases`` are further names of the same tensor (tied weights are one row). ``group`` is the
    optimizer and parameter group as ``"0/1"``, empty when no watched optimizer holds the tensor.
    ``unmeasured`` is the reason why no gradient can be expected (``"frozen"``), empty otherwise.
    ``gradient`` is the placement of gradients, None where it is that of the parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    numel: int
    requires_grad: bool = True
    module: str = ""
    module_type: str = ""
    aliases: tuple[str, ...] = ()
    group: str = ""
    unmeasured: str = ""
    placement: Placement = field(default_factory=Placement)
    gradient: Placement | None = None

    @property
    def in_model(self) -> bool:
        """Whether a module of the model holds the tensor, and not an optimizer alone."""
        return bool(self.module_type) or not self.group

    def unsharded(self) -> ParameterRecord:
        """Return the record with the size of the whole parameter."""
        if self.placement.layout is not Layout.SHARD:
            return self
        return dataclasses.replace(self, numel=math.prod(self.placement.global_shape))


@dataclass(frozen=True, slots=True)
class Subject:
    """Subject of a finding; a field is None where it does not apply or is not known."""

    parameter: str | None = None
    module: str | None = None
    step: int | None = None
    rank: int | None = None
    line: str | None = None
    verdict: str | None = None
    phase: str | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """One measurement that a finding rests on.

    ``path`` names it inside the run: ``series/gradient/norm/<parameter>``, ``scalars/loss``,
    ``events/skipped`` or a file below ``evidence/``.
    """

    path: str
    step: int | None = None
    value: float | int | str | None = None
    unit: str = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A statement that can be wrong, with its evidence, a fix and what would refute it.

    ``title`` is one line of at most 80 characters, ``detail`` one to three sentences with the numbers. A rule
    leaves ``rule``, ``monitor``, ``version`` and ``kind`` to
    :func:`backlight.findings.evaluate.evaluate_rules`. ``overridden`` holds the limits of the rule that the
    user changed, by name, ``merged`` the rules whose findings this one explains. ``accepted`` is why the
    project accepts it, empty where it does not.
    """

    severity: Severity
    title: str
    detail: str
    subject: Subject
    evidence: tuple[Evidence, ...]
    fix: str
    refuted_if: str
    rule: str = ""
    monitor: str = ""
    version: int = 1
    made: Made = Made.READER
    overridden: Mapping[str, float] = field(default_factory=dict)
    kind: FindingKind = FindingKind.FACT
    merged: tuple[str, ...] = ()
    accepted: str = ""

    def __post_init__(self) -> None:
        """Make an INFO a hint, unless it is a result: a hint is in no summary, headline or tally."""
        if self.severity is Severity.INFO and self.kind is FindingKind.FACT:
            object.__setattr__(self, "kind", FindingKind.HINT)

    @property
    def is_hint(self) -> bool:
        """Whether the finding is advice that a sound run may get."""
        return self.kind is FindingKind.HINT

    @property
    def label(self) -> str:
        """The severity as a word of a sentence: ``error``, ``warning`` or ``hint``; or ``accepted``."""
        if self.accepted:
            return "accepted"
        return (self.kind if self.is_hint else self.severity).value

    def _repr_html_(self) -> str:
        """Return what a notebook shows of one finding; a list of them is a table of the report's."""
        head = f"{self.label} · {self.rule.replace('_', ' ')}"
        where = [self.subject.parameter or self.subject.module, self.subject.line]
        if self.subject.step is not None:
            where.append(f"step {self.subject.step}")
        lines = {"where": ", ".join(part for part in where if part), "fix": self.fix}
        lines["refuted if"] = self.refuted_if
        rows = "".join(f"<div><small>{k}: {html_of(v)}</small></div>" for k, v in lines.items() if v)
        return (
            f"<div><small>{html_of(head)}</small><div><strong>{html_of(self.title)}</strong></div>"
            f"<div>{html_of(self.detail)}</div>{rows}</div>"
        )


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Facts that must agree before two runs are compared.

    ``script_hash`` is that of the script's content, without the modules that it imports. ``arguments`` are
    the script's arguments as consumed; ``flags`` are the switches of torch that change numbers or speed
    (TF32, deterministic algorithms, threads, matmul precision). ``hyperparameters`` are the options of the
    optimizers at the first step, without the learning rate, which is recorded at each. ``redacted`` names the
    arguments whose values were left out as secrets.
    """

    script: str = ""
    script_hash: str = ""
    arguments: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    host: str = ""
    module_hash: str = ""
    modules: tuple[tuple[str, str], ...] = ()
    parameter_count: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1
    redacted: tuple[str, ...] = ()
