"""Numbers, sizes, names and ``KEY=VALUE`` items as text, for messages, reports and the terminal.

Names of runs, parameters and scalars are untrusted: :func:`visible` keeps them from acting on a terminal or
from reordering a line. Escaping markup is up to the writer of that markup; :func:`html_of` does it for HTML.
"""

from __future__ import annotations

import difflib
import html
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories that are invisible, reorder text, or end a line."""


try:
    _BEGAN_IN: Path | None = Path.cwd()
except OSError:  # it was deleted
    _BEGAN_IN = None

MOST_NAMES = 60
"""Names that a message lists where none is close to the one that was given."""


def visible(text: object) -> str:
    r"""Return ``text`` on one line with every invisible or reordering character written as an escape.

    An escape sequence that would recolour a terminal becomes ``\x1b[31m`` to read, a right-to-left
    override becomes ``\u202e``.
    """
    return "".join(_shown(character) for character in str(text))


def as_typed(path: str | Path) -> str:
    """Return a path as it is typed where the process began, whatever directory the script has changed to."""
    is_below = _BEGAN_IN is not None and Path(path).is_relative_to(_BEGAN_IN)
    return str(Path(path).relative_to(_BEGAN_IN)) if _BEGAN_IN is not None and is_below else str(path)


def printable(text: str) -> str:
    """Return ``text`` as :func:`visible` does, with its line breaks."""
    if text.isprintable():  # most is
        return text
    return "\n".join(map(visible, text.split("\n")))


def html_of(text: object) -> str:
    """Return ``text`` as HTML: visible, escaped, and what is between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(visible(text)))


def _shown(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def number(value: float | None, digits: int = 4) -> str:
    """Return ``value`` with at most ``digits`` significant digits: ``12,345``, ``0.0123``, ``1.2e-9``."""
    if value is None:
        return "not measured"
    if isinstance(value, int):
        return f"{value:,}"
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    magnitude = abs(value)
    if value.is_integer() and magnitude < 1e7:
        return f"{int(value):,}"
    if 1e-3 <= magnitude < 1e7:
        decimals = max(0, digits - 1 - math.floor(math.log10(magnitude)))
        text = f"{value:,.{decimals}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"


def with_unit(value: float | str | None, unit: str) -> str:
    """Return a value with its unit where that says something to a reader (seconds do, ``1`` does not)."""
    shown = visible(value) if isinstance(value, str) else number(value)
    return f"{shown} {visible(unit)}" if unit in {"s", "ms", "B", "%"} and value is not None else shown


def percent(share: float) -> str:
    """Return a share as a percentage that is 0 % or 100 % only where it is exactly that."""
    if math.isnan(share):
        return "not measured"
    if 0 < share < 0.001:
        return "< 0.1 %"
    if 0.999 < share < 1:
        return "> 99.9 %"
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def power(base: str, exponent: int) -> str:
    """Return ``base`` with a raised exponent: ``2⁻²⁴``."""
    return base + str(exponent).translate(_RAISED)


def score(value: float) -> str:
    """Return a score between 0 and 1 that is 1 only where it is exactly that."""
    return "> 0.999" if 0.9995 <= value < 1 else number(value, 3)


def count(amount: int, singular: str, many: str = "") -> str:
    """Return ``1 step`` or ``12,345 steps``."""
    return f"{amount:,} {singular if amount == 1 else many or singular + 's'}"


def duration(seconds: float) -> str:
    """Return a time span: ``3 min 12 s``, ``1.25 ms``."""
    if not math.isfinite(seconds) or seconds < 0:
        return "not known"
    for below, times, unit in ((1e-3, 1e6, "\N{MICRO SIGN}s"), (1.0, 1e3, "ms"), (60.0, 1.0, "s")):
        if seconds < below:
            return f"{number(seconds * times, 3)} {unit}"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def listed(items: Sequence[str], most: int = 3) -> str:
    """Return ``a, b, c and 12 more``."""
    shown = ", ".join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most:,} more"


def shortened(name: str, most: int = 40) -> str:
    """Return the end of a name in at most ``most`` characters, behind a dot where it has one: ``…weight``."""
    if len(name) <= most:
        return name
    end = name[len(name) - most + 1 :]
    return f"…{end.partition('.')[2] or end}"


def told_apart(names: Sequence[str], width: int) -> dict[str, str]:
    """Return the names in at most ``width`` characters, shortened so that they differ where that is possible.

    One cut in the middle is tried first, then one in each long part of the names, then cuts elsewhere. Names
    that are still equal show where they begin to differ.
    """

    def once(name: str, tail: int) -> str:
        return name if len(name) <= width else f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"

    def where_they_differ(name: str, start: int) -> str:
        head = width // 3
        if len(name) <= width or start <= head:
            return once(name, 0)
        rest = name[start - 2 :]
        return f"{name[:head]}…{rest if len(rest) < width - head else f'{rest[: width - head - 2]}…'}"

    tails = (width * 2 // 3, max(0, width - 4), width // 4, 0)
    first, *others = (partial(once, tail=tail) for tail in tails)
    best: dict[str, str] = {}
    for cut in (first, partial(_shortened_parts, width=width), *others):
        shown = {name: cut(name) for name in names}
        if all(len(text) <= width for text in shown.values()) and len(set(shown.values())) > len(
            set(best.values())
        ):
            best = shown
    for text in [text for text, times in Counter(best.values()).items() if times > 1]:
        equal = [name for name in best if best[name] == text]
        columns = takewhile(lambda letters: len(set(letters)) == 1, zip(*equal, strict=False))
        start = sum(1 for _ in columns)
        best |= {name: where_they_differ(name, start) for name in equal}
    return best


def _shortened_parts(name: str, width: int) -> str:
    parts = re.split(r"([.:/ ]+)", name)
    kept = [len(part) for part in parts]
    while sum(kept) > width and max(kept) > 2:
        kept[kept.index(max(kept))] -= 1
    return "".join(
        part if len(part) <= k else f"{part[: k - 1]}…" for part, k in zip(parts, kept, strict=True)
    )


def size(nbytes: float) -> str:
    """Return a number of bytes in powers of 1000: ``1.25 GB``."""
    return scaled(nbytes, "B")


def scaled(value: float, unit: str) -> str:
    """Return an amount in powers of 1000 of a unit: ``1.25 TFLOP``."""
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            amount = value / factor
            return f"{amount:.3g} {prefix}{unit}" if abs(amount) < 999.5 else f"{amount:.0f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def did_you_mean(name: str, choices: Iterable[str], prefix: str = "") -> str:
    """Return ``; did you mean 'x'?`` for the end of a message, or the known names where none is close.

    ``prefix`` is put before the suggestion: the section of a key.
    """
    names = list(choices)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {prefix + close[0]!r}?"
    return f"; there are: {listed(names, MOST_NAMES)}" if names else "; there are none"


_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str, where: str) -> int:
    """Return bytes of ``"500M"`` or ``"2.5G"``, of powers of 1000; ValueError for no positive size."""
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", text, re.IGNORECASE)
    size = int(float(parts[1]) * _FACTORS[parts[2].upper()]) if parts else 0
    if size <= 0:
        raise ValueError(f"{where} {text!r}: expected a size such as 500M or 2G")
    return size


def assignment(item: str, option: str, example: str, error: type[ValueError] = ValueError) -> tuple[str, str]:
    """Return key and value of a ``KEY=VALUE`` item of the command line, stripped."""
    key, sign, value = (part.strip() for part in item.partition("="))
    if not (key and sign and value):
        raise error(f"{option} {item!r}: expected {example}")
    return key, value


def assignments(
    items: Iterable[str], option: str, example: str, error: type[ValueError] = ValueError
) -> dict[str, str]:
    """Return values by key from ``KEY=VALUE`` items of the command line."""
    by_key: dict[str, str] = {}
    for item in items:
        key, value = assignment(item, option, example, error)
        if key in by_key:
            raise error(f"{option} {item!r}: {key} is given twice")
        by_key[key] = value
    return by_key
