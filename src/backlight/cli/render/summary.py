"""What is printed after a watched script, on standard error."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console


def after_run(path: Path) -> None:
    """Print the findings of the run in ``path`` and what to type next; silent where there is no run."""
    from backlight.findings.evaluate import findings_of
    from backlight.report.terminal import print_findings
    from backlight.store.errors import StoreError
    from backlight.store.read.run import open_run

    console = Console(stderr=True)
    try:
        run = open_run(path)
        print_findings(run, findings_of(run), console)
    except StoreError as error:
        console.print(f"backlight: {error}", markup=False, highlight=False)
        return
    console.print(f"next: backlight report {path}", markup=False, highlight=False, soft_wrap=True)
