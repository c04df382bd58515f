from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backlight import codec
from backlight.findings.evaluate import (
    FindingNameError,
    RuleFailedWarning,
    as_reported,
    evaluate_rules,
    findings_of,
    in_order,
    merge_causes,
    parse_fail_on,
    separate_hints,
    withdrawn,
)
from backlight.findings.limits import ThresholdError
from backlight.records import Finding, FindingKind, Made, ParameterRecord, Severity, Subject
from backlight.registry import RULES, Rule
from backlight.store.format.schema import REPORTED, STATIC_READING
from backlight.store.read.run import Run
from run_builder import build_health_run, build_run


def write(
    path: Path, *, stored: tuple[Finding, ...] = (), steps: int = 30, dead: bool = True, **more: Any
) -> Run:
    more = {"monitors": ("health",), **more}
    records = tuple(ParameterRecord(n, (4, 4), "float32", "cpu", 16, group="0/0") for n in ("alive", "dead"))
    floats = np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0] if dead else [1.0, 1.0, 0.0]])
    ints = np.array([[1, 16, 0, 0, 0], [1, 16, 16 if dead else 0, 0, 0]])
    series = {"gradient": dict.fromkeys(range(steps), (floats, ints))}
    return build_run(path, name="evaluated", table=records, series=series, findings=stored, **more)


def finding(
    rule: str, *, made: Made = Made.LIVE, severity: Severity = Severity.WARNING, **subject: Any
) -> Finding:
    return Finding(
        rule=rule,
        severity=severity,
        title=f"an old {rule}",
        detail="detail",
        subject=Subject(**subject),
        evidence=(),
        fix="fix",
        refuted_if="refuted",
        made=made,
    )


@pytest.fixture
def broken_rule() -> Iterator[None]:
    def evaluate(_run: Any, _limits: Any) -> Iterator[Finding]:
        yield finding("broken", step=1)
        raise ZeroDivisionError("half way")

    RULES.add("broken", Rule("broken", "health", 1, evaluate))
    yield
    RULES._entries.pop("broken")


def test_finding_records_version_origin_and_overrides(tmp_path: Path) -> None:
    run = write(tmp_path / "run", overrides={"health": {"zero_window": 10.0, "spike_gap": 7.0}})
    (found,) = evaluate_rules(run, made=Made.LIVE)
    assert found.rule == "no_gradient"
    assert found.version == RULES["no_gradient"].version
    assert found.made is Made.LIVE
    assert found.overridden == {"zero_window": 10}  # spike_gap is not a threshold of this rule


def test_caller_overrides_take_precedence_over_recorded_ones(tmp_path: Path) -> None:
    run = write(tmp_path / "run", overrides={"health": {"zero_window": 10.0}})
    assert not evaluate_rules(run, {"health": {"zero_window": 31}})
    with pytest.raises(ThresholdError, match="no threshold 'zero_windw'; did you mean 'zero_window'"):
        evaluate_rules(run, {"health": {"zero_windw": 31}})


def test_unknown_recorded_override_is_ignored_with_a_warning(tmp_path: Path) -> None:
    run = write(tmp_path / "run", overrides={"health": {"of_the_future": 1.0, "zero_window": 12.0}})
    with pytest.warns(UserWarning, match="is ignored: the health monitor has no threshold 'of_the_future'"):
        (found,) = evaluate_rules(run)
    assert found.overridden == {"zero_window": 12}


def test_only_rules_of_the_run_monitors_are_evaluated(tmp_path: Path) -> None:
    assert not evaluate_rules(write(tmp_path / "other", monitors=("steptime",)))
    assert evaluate_rules(write(tmp_path / "all", monitors=()))


@pytest.mark.usefixtures("broken_rule")
def test_failing_rule_warns_and_other_rules_run(tmp_path: Path) -> None:
    with pytest.warns(
        RuleFailedWarning, match="rule 'broken' of monitor 'health' failed.*ZeroDivisionError: half way"
    ):
        found = evaluate_rules(write(tmp_path / "run"))
    assert [f.rule for f in found] == ["no_gradient", "broken"]


def test_findings_are_sorted_by_severity_then_step() -> None:
    late = finding("b", severity=Severity.ERROR, step=9)
    early = finding("a", severity=Severity.ERROR, step=3)
    nowhere = finding("c", severity=Severity.ERROR)
    info = finding("d", severity=Severity.INFO, step=0)
    assert in_order([info, nowhere, late, early]) == [early, late, nowhere, info]


def test_facts_come_before_statistics_of_the_same_severity() -> None:
    early = dataclasses.replace(finding("exploding", step=3), kind=FindingKind.STATISTIC)
    fact, error = finding("no_gradient", step=9), finding("spike", severity=Severity.ERROR, step=20)
    assert in_order([early, fact, error]) == [error, fact, early]


def test_rules_mark_their_findings_as_facts_statistics_or_hints(tmp_path: Path) -> None:
    (fact,) = evaluate_rules(write(tmp_path / "run"))
    assert fact.kind is FindingKind.FACT
    (statistic,) = evaluate_rules(
        build_health_run(tmp_path / "vanishing", {"a.weight": [1e-12] * 30, "b.weight": [1e-3] * 30})
    )
    assert (statistic.rule, statistic.kind) == ("vanishing", FindingKind.STATISTIC)
    hint = finding("spike", severity=Severity.INFO)
    assert hint.kind is FindingKind.HINT
    assert codec.plain(hint)["kind"] == "hint"
    assert separate_hints([hint, fact]) == ([fact], [hint])


MODE = finding("module_modes", step=30)
EXPLODING = dataclasses.replace(
    finding("exploding", severity=Severity.ERROR, step=33), kind=FindingKind.STATISTIC
)


def test_statistic_is_merged_into_the_fact_that_explains_it() -> None:
    (merged,) = merge_causes([EXPLODING, MODE])
    assert (merged.rule, merged.severity, merged.merged) == ("module_modes", Severity.ERROR, ("exploding",))
    assert merged.detail == "detail This explains: an old exploding (exploding)."
    assert merge_causes([merged]) == [merged]
    assert merge_causes([merged, EXPLODING]) == [merged]
    later = dataclasses.replace(EXPLODING, title="a later one", subject=Subject(step=40))
    (merged,) = merge_causes([EXPLODING, later, MODE])
    assert merged.detail == "detail This explains: an old exploding (exploding); a later one (exploding)."


@pytest.mark.parametrize(
    "other",
    [
        finding("module_modes", step=34),  # begins later
        finding("module_modes", severity=Severity.INFO, step=30),
        finding("no_gradient", step=30),  # no cause of it
    ],
    ids=("later", "hint", "other rule"),
)
def test_statistic_stays_beside_what_does_not_explain_it(other: Finding) -> None:
    assert {found.rule for found in merge_causes([EXPLODING, other])} == {"exploding", other.rule}


def test_hint_is_absorbed_without_a_word() -> None:
    hint = finding("exploding", severity=Severity.INFO, step=33)
    (merged,) = merge_causes([hint, MODE])
    assert (merged.severity, merged.detail) == (Severity.WARNING, "detail")


def test_no_rule_explains_one_that_explains_it() -> None:
    explained = {name: RULES[name].explained_by for name in RULES}
    for name, causes in explained.items():
        assert set(causes) <= set(RULES), name
        assert all(name not in explained[cause] for cause in causes), name


def test_stored_finding_of_another_subject_marks_no_fresh_one(tmp_path: Path) -> None:
    run = write(tmp_path / "run", stored=(finding("spike", step=3),))
    assert {f.rule: f.made for f in findings_of(run)} == {"no_gradient": Made.READER, "spike": Made.LIVE}


def test_reported_finding_is_withdrawn_unless_it_holds_or_is_explained(tmp_path: Path) -> None:
    error = finding("spike", severity=Severity.ERROR, parameter="a")
    run = build_run(tmp_path / "run", monitors=("health",), events=[(3, REPORTED, as_reported(error))])
    other = finding("spike", severity=Severity.ERROR, parameter="b")
    explaining = dataclasses.replace(finding("non_finite", severity=Severity.ERROR), merged=("spike",))
    for holds in (error, explaining, dataclasses.replace(other, kind=FindingKind.STATISTIC)):
        assert withdrawn(run, [holds]) == []
    for findings, reason in (
        ([], "the rule does not find it"),
        ([other, finding("non_finite", severity=Severity.ERROR)], "the rule does not find it"),
        ([finding("spike", parameter="a")], "it is: warning"),
    ):
        (item,) = withdrawn(run, findings)
        assert (item.rule, item.severity, item.step) == ("spike", Severity.ERROR, 3)
        assert reason in item.reason


def test_new_finding_replaces_stored_one_of_the_same_subject(tmp_path: Path) -> None:
    same = finding("no_gradient", parameter="dead", module="", step=20)
    gone = finding("vanishing", parameter="alive")
    earlier = dataclasses.replace(gone, title="an older vanishing")
    run = write(tmp_path / "run", stored=(same, earlier, gone))
    new, kept = sorted(findings_of(run), key=lambda f: f.rule)
    assert (new.rule, new.made) == ("no_gradient", Made.LIVE)
    assert new.title != same.title
    assert kept == gone
    by_reader = dataclasses.replace(same, made=Made.READER)
    (found,) = findings_of(write(tmp_path / "reader", stored=(by_reader,)))
    assert found.made is Made.READER


def test_findings_of_one_subject_are_matched_by_step(tmp_path: Path) -> None:
    loss = np.random.default_rng(0).lognormal(0, 0.05, 200)
    loss[[100, 150]] *= 30
    stored = [finding("spike", step=100)]
    run = build_run(tmp_path / "run", monitors=("health",), scalars={"loss": loss}, findings=stored)
    found = {f.subject.step: f.made for f in findings_of(run)}
    assert found == {100: Made.LIVE, 150: Made.READER}


SPIKE = finding("spike")
BROKEN = finding("non_finite", severity=Severity.ERROR)
FROZEN = finding("no_gradient", severity=Severity.INFO)


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("non_finite", [BROKEN]),
        ("error", [BROKEN]),
        ("warning", [SPIKE, BROKEN]),
        ("info", [SPIKE, BROKEN, FROZEN]),
        ("spike, no_gradient", [SPIKE, FROZEN]),
        ("no_gradient,error,", [BROKEN, FROZEN]),
    ],
)
def test_fail_on_matches_severities_and_rules(text: str, matches: list[Finding]) -> None:
    matching = parse_fail_on(text)
    assert [f for f in (SPIKE, BROKEN, FROZEN) if matching(f)] == matches


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a severity or names of rules"),
        (" , ", "expected a severity or names of rules"),
        ("spyke", "no severity or rule is called 'spyke'; did you mean 'spike'"),
        ("eror,spike", "did you mean 'error'"),
        ("non_finite or spike", "'non_finite or spike'"),
        ("xyz", "there are: info, warning, error, activations, always_clipped, "),
    ],
)
def test_fail_on_rejects_unknown_names(text: str, message: str) -> None:
    with pytest.raises(FindingNameError, match=message):
        parse_fail_on(text)


def read_lines(path: Path, *places: str) -> list[Finding]:
    """Return the finding on a dead parameter of a run whose script was read."""
    payloads = [{"rules": ["no_gradient"], "place": place, "title": ""} for place in places]
    run = write(path, events=[(None, STATIC_READING, payload) for payload in payloads])
    return [each for each in evaluate_rules(run) if each.rule == "no_gradient"]


def test_finding_has_the_line_of_the_static_reading(tmp_path: Path) -> None:
    (dead,) = read_lines(tmp_path / "one", "train.py:7")
    assert dead.subject.line == "train.py:7"
    assert dead.evidence[-1].path == "events/static_reading"
    assert dead.evidence[-1].value == "train.py:7"
    (plain,) = read_lines(tmp_path / "none")
    assert (plain.subject.line, len(plain.evidence)) == (None, len(dead.evidence) - 1)


def test_two_lines_of_the_static_reading_are_evidence_alone(tmp_path: Path) -> None:
    (dead,) = read_lines(tmp_path / "two", "train.py:7", "train.py:9", "train.py:7")
    assert dead.subject.line is None
    assert [each.value for each in dead.evidence[-2:]] == ["train.py:7", "train.py:9"]
