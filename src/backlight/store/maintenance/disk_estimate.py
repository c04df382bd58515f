"""What a setting costs on disk, before it is chosen."""

from __future__ import annotations

from backlight.store.write.database import PAGE_SIZE

ROW_BYTES = 24
"""Bytes of a row apart from its numbers: ids, step, checksum, lengths."""

SCALAR_BYTES = 21
"""Bytes of one scalar: row id, step, name and a float64."""


def estimate(parameters: int, columns: int, every: int, steps: int, *, scalars: int = 12) -> int:
    """Return the bytes that ``steps`` steps take at most, when every ``every``-th one is recorded.

    Parameters
    ----------
    parameters:
        Rows of the parameter table.
    columns:
        Numbers per parameter and recorded step: 8 for gradients, 5 for updates, 65 for histograms.
    scalars:
        Scalars per step.

    Raises
    ------
    ValueError
        If an argument is negative, or ``every`` is not positive.

    Notes
    -----
    Every number is counted with 8 bytes. Counts and narrow floats usually take less, so that
    gradients come to about 0.35 of this.
    """
    if min(parameters, columns, steps, scalars) < 0 or every < 1:
        msg = (
            f"got {parameters} parameters, {columns} columns, every {every}, {steps} steps, {scalars} scalars"
        )
        raise ValueError(f"{msg}; expected none negative and every at least 1")
    recorded = -(-steps // every)
    row = ROW_BYTES + columns + parameters * columns * 8
    # A row that is larger than a page leaves part of its last page empty, smaller ones a part of each.
    pages = -(-row // PAGE_SIZE) if row > PAGE_SIZE else 1 / (PAGE_SIZE // row)
    tables = 420 * parameters + 16 * PAGE_SIZE
    return int(recorded * pages * PAGE_SIZE + steps * scalars * SCALAR_BYTES * 1.05 + tables)
