"""The text of every finding on its injected fault; ``python tests/findings_snapshot.py --update``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

SNAPSHOT = Path(__file__).with_name("snapshots") / "findings.md"
HEAD = "# Findings on injected faults\n\nWritten by `python tests/findings_snapshot.py --update`.\n"


def taken(folder: Path) -> str:
    """Return the snapshot as the rules write it now; runs are made below ``folder``."""
    from backlight.findings.evaluate import evaluate_rules, findings_of
    from backlight.registry import RULES
    from injected_faults import FAULTS

    parts = [HEAD]
    for name, rule in RULES.items():
        if RULES.origin(name) is not None:
            continue  # of another distribution
        run = FAULTS[name](folder / name)
        found = [f for f in (findings_of if rule.restates else evaluate_rules)(run) if f.rule == name]
        parts.append(f"## {name}\n")
        parts += [
            f"{f.severity}: {f.title}\n\n- detail: {f.detail}\n- fix: {f.fix}\n- refuted if: {f.refuted_if}\n"
            for f in found
        ]
    return "\n".join(parts)


if __name__ == "__main__":
    if "--update" not in sys.argv:
        sys.exit("usage: python tests/findings_snapshot.py --update")
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as made:
        SNAPSHOT.parent.mkdir(exist_ok=True)
        SNAPSHOT.write_text(taken(Path(made)), encoding="utf-8")
