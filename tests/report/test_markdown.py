"""Findings in Markdown; names of a run are escaped."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import Plan, finding, write_run

from backlight.report.markdown import code, escape, render_markdown


def test_verdict_comes_first(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=10, unmeasured={7: "frozen"}, name="first run"))
    text = render_markdown(run, [finding("embed.weight", 3, overridden={"vanishing_rms": 1e-9})])
    lines = text.splitlines()
    assert lines[0] == "# first run: The gradient of `embed.weight` is not finite from step 3 on"
    assert lines[2] == "1 error. Gradients of 50 of 51 parameters and the loss were measured at all 10 steps."
    assert lines[4].startswith("finished")
    assert "## error: The gradient of `embed.weight` is not finite from step 3 on" in lines
    assert "- evidence: `series/gradient/non_finite/embed.weight` at step 3: 12,288" in lines
    assert "- overridden: `vanishing_rms` = 1e-9" in lines
    assert "- refuted if: the same step, repeated from its checkpoint, has finite gradients" in lines
    assert "- 1 parameter: frozen: `blocks.0.ln_2.weight`" in lines


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)&gt;"),
        ("[click](javascript:x)", "\\[click\\](javascript:x)"),
        ("*bold* _x_ `y` a|b", "\\*bold\\* \\_x\\_ \\`y\\` a\\|b"),
        ("# title", "\\# title"),
        ("- item", "\\- item"),
        ("1. item", "1\\. item"),
        ("a\nb", "a\\\\nb"),
        ("see https://x.y and @name", "see https&#8203;://x.y and @&#8203;name"),
        ("3.2e-12", "3.2e-12"),
    ],
)
def test_text_is_escaped(text: str, safe: str) -> None:
    assert escape(text) == safe


@pytest.mark.parametrize(
    ("text", "safe"),
    [("plain", "`plain`"), ("a`b", "``a`b``"), ("`", "`` ` ``"), ("``x", "``` ``x ```"), ("<b>", "`<b>`")],
)
def test_code_is_escaped(text: str, safe: str) -> None:
    assert code(text) == safe


def test_hostile_run_is_text(tmp_path: Path) -> None:
    name = "w`]()<script>alert(1)</script>\n# owned"
    plan = Plan(steps=5, name="<h1>x</h1>", rename={3: name}, unmeasured={3: "frozen <b>"})
    text = render_markdown(write_run(tmp_path / "run", plan), [finding(name, 2)])
    outside = [part for line in text.splitlines() for part in line.split("``")[::2]]
    assert not [part for part in outside if "<" in part]
    assert not [line for line in text.splitlines() if line.startswith("# owned")]
