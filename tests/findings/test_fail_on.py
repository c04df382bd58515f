import pytest

from backlight.findings.fail_on import ExpressionError, compile
from backlight.records import Finding, Made, Severity, Subject
from backlight.registry import RULES


def finding(rule: str, severity: Severity = Severity.WARNING, **subject: object) -> Finding:
    return Finding(rule, severity, "claim", Subject(**subject), (), "next", "refuted")  # type: ignore[arg-type]


SPIKE = finding("spike", Severity.WARNING, step=120, parameter="head.weight", module="head")
BROKEN = finding("non_finite", Severity.ERROR, step=7)
FROZEN = finding("no_gradient", Severity.INFO)


@pytest.mark.parametrize(
    ("expression", "matches"),
    [
        ("non_finite", [BROKEN]),
        ("severity>=error", [BROKEN]),
        ("severity >= warning", [SPIKE, BROKEN]),
        ("severity>info", [SPIKE, BROKEN]),
        ("severity<error", [SPIKE, FROZEN]),
        ("severity<=info", [FROZEN]),
        ("severity==warning", [SPIKE]),
        ("severity!=warning", [BROKEN, FROZEN]),
        ("non_finite or severity>=error", [BROKEN]),
        ("rule==spike", [SPIKE]),
        ("rule!='spike'", [BROKEN, FROZEN]),
        ('parameter=="head.weight"', [SPIKE]),
        ("parameter==head.weight", [SPIKE]),
        ("module==head", [SPIKE]),
        ("step>100", [SPIKE]),
        ("step<100", [BROKEN]),
        ("made==live", []),
        ("not spike", [BROKEN, FROZEN]),
        ("not (spike or non_finite)", [FROZEN]),
        ("spike or no_gradient and severity==error", [SPIKE]),
        ("(spike or no_gradient) and severity==error", []),
        ("not not spike and step==120", [SPIKE]),
    ],
)
def test_what_an_expression_matches(expression: str, matches: list[Finding]) -> None:
    matching = compile(expression)
    assert [f for f in (SPIKE, BROKEN, FROZEN) if matching(f)] == matches


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "position 1: the expression is empty"),
        ("spyke", "position 1: no rule is called 'spyke'; did you mean 'spike'"),
        (
            "severity>=err",
            "position 11: no severity is called 'err'; did you mean 'error'.* info, warning, error",
        ),
        ("severity", "position 9: expected an operator after the field 'severity'"),
        ("severity >=", "position 12: expected a value after severity>=, got the end"),
        ("spike non_finite", "position 7: expected 'and', 'or' or the end, got 'non_finite'"),
        ("spike and", "position 10: expected the name of a rule or a comparison, got the end"),
        ("and spike", "position 1: expected the name of a rule or a comparison, got 'and'"),
        ("(spike", r"position 7: expected '\)'"),
        ("spike)", r"position 6: expected 'and', 'or' or the end, got '\)'"),
        ("rule>=spike", "position 5: rule knows only == and !=, got '>='"),
        ("step>many", "position 6: step is compared with a number, got 'many'"),
        ("colour==red", "position 1: no field is called 'colour'; there are severity, rule"),
        ("spike; import os", r"position 6: ';' has no meaning here"),
        ("__import__('os')", "position 1: no rule is called '__import__'"),
        ("rule==or", "position 7: expected a value, got 'or'"),
    ],
)
def test_errors_point_to_the_place(expression: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        compile(expression)


def test_an_unknown_rule_lists_those_that_exist() -> None:
    with pytest.raises(ExpressionError, match=", ".join(RULES)):
        compile("nothing_like_this")


def test_the_origin_of_a_finding_counts() -> None:
    live = Finding("spike", Severity.INFO, "", Subject(), (), "", "", made=Made.LIVE)
    assert compile("made==live")(live)
    assert not compile("made==live")(SPIKE)
