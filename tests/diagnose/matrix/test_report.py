"""Text of cases and plans is shown in every format and acts in none."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt

from backlight.diagnose.matrix.report import as_code, as_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("PASS -> BLOCKED (2 s), 1.5 of 3", "PASS -> BLOCKED (2 s), 1.5 of 3"),
        (
            "<b> & | *x* _y_ `z` [a](b) ~~c~~",
            "&lt;b> &amp; \\| \\*x\\* \\_y\\_ \\`z\\` \\[a\\](b) \\~\\~c\\~\\~",
        ),
        ("- item", "\\- item"),
        ("1. item", "1\\. item"),
        ("2026-11-21 02:47", "2026-11-21 02:47"),
        ("1.5 s", "1.5 s"),
        ("fixes #12", "fixes #&#8203;12"),
        ("# head", "\\# head"),
        ("> said", "\\> said"),
        ("@someone https://example.org", "@&#8203;someone h&#8203;ttps://example.org"),
        ("a\nb\x1b[31m\u202e", "a\\\\nb\\\\x1b\\[31m\\\\u202e"),
    ],
)
def test_markdown_shows_text_as_it_is(text: str, shown: str) -> None:
    assert as_text(text) == shown


def test_code_spans_hold_backticks() -> None:
    assert as_code("a") == "`a`"
    assert as_code("a`b``c") == "```a`b``c```"
    assert as_code("`") == "`` ` ``"


def test_html_shows_text_literally() -> None:
    html = MarkdownIt("commonmark", {"html": False}).render(as_text("<a href='x'>*a*&[b](c)\t"))
    assert html == "<p>&lt;a href='x'&gt;*a*&amp;[b](c)\\t</p>\n"
