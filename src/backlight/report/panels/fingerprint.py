"""What the run was: what must agree before it is compared with another."""

from __future__ import annotations

from collections.abc import Mapping

from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import visible


@panel("fingerprint", title="Fingerprint", order=130, series=("fingerprint",))
def fingerprint(source: Source) -> Drawn | NotMeasured:
    """List the fingerprint of the lowest rank of the attempt shown, and the tree of modules."""
    attempt = -1 if source.attempt is None else source.attempt
    stored = source.run.fingerprint(attempt)
    if stored is None:
        return NotMeasured("No fingerprint was stored: the process ended before its first step.")
    rows: list[tuple[str, str]] = [
        ("script", stored.script),
        ("arguments", " ".join(stored.arguments) or "none"),
        ("parameters", f"{stored.parameter_count:,} in {len(source.parameters):,} tensors"),
        ("types", _pairs({name: f"{amount:,}" for name, amount in stored.dtypes.items()})),
        ("optimizers", ", ".join(stored.optimizers)),
        ("device", stored.device),
        ("host", stored.host),
        ("processes", str(stored.world_size)),
        ("versions", _pairs(stored.versions)),
        ("flags", _pairs(stored.flags)),
        ("module tree", stored.module_hash),
        ("run id", source.run.run_id),
    ]
    tree = [(visible(name) or "(model)", visible(kind)) for name, kind in stored.modules]
    return Drawn("table", {"rows": [(key, visible(value)) for key, value in rows if value], "tree": tree})


def _pairs(pairs: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in pairs.items() if value)
