"""What is printed after a watched script, on standard error."""

from __future__ import annotations

from pathlib import Path

from backlight.cli.console import make_console


def after_run(path: Path) -> None:
    """Print the findings of the run in ``path`` and what to type next; silent where there is no run."""
    from backlight.findings.evaluate import findings_of
    from backlight.report.terminal import print_findings
    from backlight.store.errors import StoreError
    from backlight.store.read.run import open_run

    console = make_console(stderr=True)
    try:
        run = open_run(path)
        print_findings(run, findings_of(run), console)
    except StoreError as error:
        console.print(f"backlight: {error}")
        return
    console.print(f"next: backlight report {path}", soft_wrap=True)
