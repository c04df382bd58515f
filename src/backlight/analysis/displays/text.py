"""Text displays, as the command prints them to a file."""

from __future__ import annotations

import io

from backlight.findings.evaluate import Findings
from backlight.registry import DISPLAYS
from backlight.report.terminal import print_findings
from backlight.terminal import make_console


@DISPLAYS.register("findings as text")
def findings_text(findings: Findings) -> str:
    """Return what ``backlight findings`` prints, without the end of the last line."""
    text = io.StringIO()
    # In a notebook a console would display what it prints, and not write it.
    print_findings(findings.run, findings, make_console(file=text, force_jupyter=False))
    return text.getvalue().removesuffix("\n")
