import pytest

from backlight.findings.fail_on import FailOnError, parse_fail_on
from backlight.records import Finding, Severity, Subject


def finding(rule: str, severity: Severity) -> Finding:
    return Finding(
        rule=rule, severity=severity, title="title", detail="detail", subject=Subject(), evidence=(),
        fix="fix", refuted_if="refuted",
    )  # fmt: skip


SPIKE = finding("spike", Severity.WARNING)
BROKEN = finding("non_finite", Severity.ERROR)
FROZEN = finding("no_gradient", Severity.INFO)


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
def test_a_severity_or_a_list_of_rules_matches(text: str, matches: list[Finding]) -> None:
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
        ("xyz", "expected one of info, warning, error, accumulating"),
    ],
)
def test_an_unknown_name_is_refused(text: str, message: str) -> None:
    with pytest.raises(FailOnError, match=message):
        parse_fail_on(text)
