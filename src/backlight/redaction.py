"""Secrets in arguments and variables: recognised by name or shape, and replaced before anything is stored."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backlight.records import Fingerprint
from backlight.setting_error import SettingError

REDACTED = "<redacted>"

NAME = (
    r"api[-_.]?keys?|access[-_.]?keys?|(?:private|secret|signing|encryption|license|account)[-_.]?keys?"
    r"|(?:wandb|comet|neptune|hf|huggingface|openai|anthropic|github|slack|aws|azure|gcp)[-_.]?keys?"
    r"|secrets?|pass(?:word|wd|phrase)s?|pwd|credentials?|auth(?:orization|entication)?|bearer|cookies?"
    r"|webhook(?:[-_.]?url)?|dsn|connection[-_.]?string"
)
"""Words of names whose values are secrets, whatever comes before or after them."""

TOKEN = r"(?<!pad.)(?<!bos.)(?<!eos.)(?<!unk.)(?<!sep.)(?<!cls.)(?<!mask.)(?<!per.)(?<!special.)token"
"""The word that ends a name whose value is a secret, other than tokens of a text."""

SHAPES = (
    r"hf_[A-Za-z0-9]{16,}",
    r"gh[pousr]_[A-Za-z0-9]{20,}",
    r"github_pat_\w{20,}",
    r"glpat-[\w-]{16,}",
    r"xox[abeprs]-[\w-]{10,}",
    r"sk-[\w-]{16,}",
    r"(?:AKIA|ASIA)[0-9A-Z]{16}",
    r"AIza[\w-]{30,}",
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    r"(?<=://)[^\s/@]*:[^\s/@]+(?=@)",
    r"(?<=[?&]sig=)[^&\s]+",
    r"(?<=X-Amz-Signature=)[^&\s]+",
    r"(?<=Bearer )\S+",
)
"""Shapes of values that are secrets under any name: tokens of services, passwords in addresses."""

_NAME = re.compile(rf"(?<![a-z0-9])(?:{NAME})(?![a-z0-9])", re.IGNORECASE)
_TOKEN = re.compile(rf"(?<![a-z0-9]){TOKEN}$", re.IGNORECASE)
_SWITCH = re.compile(r"(?:true|false|none|null)?", re.IGNORECASE)
_OF_TEXT = re.compile(r"[\d.eE+-]*|<.*>|\[.*\]")
_SHAPE = re.compile("|".join(SHAPES))
_NAMED = re.compile(r"[-+~]*[\w.\-/@]+")
_INSIDE = re.compile(r"""(?P<name>[\w.\-]+)(?P<sign>["']?\s*[:=]\s*["']?)(?P<value>[^"',{}&\s]+)""")


@dataclass(frozen=True)
class Redaction:
    """Replaces secrets; ``patterns`` are regular expressions for further names and parts of values."""

    patterns: tuple[str, ...] = ()

    def is_secret(self, name: str, value: str) -> bool:
        """Return whether the value of an option or variable of this name is a secret."""
        if _SWITCH.fullmatch(value):
            return False
        plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
        if _NAME.search(plain) or re.fullmatch(r"[A-Z0-9_]*KEY", name):
            return True
        if any(re.search(pattern, name) for pattern in self.patterns):
            return True
        # The number of a token, or one of a vocabulary such as <image>, is none.
        return _TOKEN.search(plain) is not None and _OF_TEXT.fullmatch(value) is None

    def text(self, text: str) -> str:
        """Return a text without the secrets that have a name or a known shape in it."""
        return _INSIDE.sub(self._pair, self._by_shape(text))

    def variables(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables with redacted values."""
        return {k: REDACTED if self.is_secret(k, v) else self._by_shape(v) for k, v in values.items()}

    def arguments(self, given: Sequence[str]) -> tuple[str, ...]:
        """Return the arguments of a script with redacted values."""
        out: list[str] = []
        owner = ""  # the option that takes the argument
        for argument in given:
            name, sign, value = argument.partition("=")
            if sign and _NAMED.fullmatch(name):
                out.append(f"{name}={REDACTED}" if self.is_secret(name, value) else self.text(argument))
                owner = ""
            elif re.match(r"--?[A-Za-z]", argument):
                out.append(_SHAPE.sub(REDACTED, argument))
                owner = argument
            else:
                out.append(REDACTED if owner and self.is_secret(owner, argument) else self.text(argument))
                owner = owner if owner.endswith("s") else ""  # `--api-keys A B`
        return tuple(out)

    def fingerprint(self, given: Fingerprint) -> Fingerprint:
        """Return a fingerprint with redacted arguments, and the names of those in ``redacted``."""
        arguments = self.arguments(given.arguments)
        if arguments == given.arguments:
            return given
        names = [
            _name_of(arguments, i) for i, pair in enumerate(zip(arguments, given.arguments, strict=True))
            if pair[0] != pair[1]
        ]  # fmt: skip
        return dataclasses.replace(given, arguments=arguments, redacted=tuple(dict.fromkeys(names)))

    def _pair(self, found: re.Match[str]) -> str:
        if not self.is_secret(found["name"], found["value"]):
            return found[0]
        return f"{found['name']}{found['sign']}{REDACTED}"

    def _by_shape(self, text: str) -> str:
        text = _SHAPE.sub(REDACTED, text)
        for pattern in self.patterns:
            text = re.sub(pattern, REDACTED, text)
        return text


def check_patterns(patterns: Sequence[str]) -> None:
    """Raise ValueError for a pattern that is no regular expression, or that matches the empty text."""
    for pattern in patterns:
        try:
            matches_nothing = re.compile(pattern).search("") is not None
        except re.error as error:
            problem = f"{pattern!r} is no regular expression, such as 'passport|my_key': {error}"
            raise SettingError("redact", problem) from None
        if matches_nothing:
            raise SettingError("redact", f"{pattern!r} matches the empty text, and so everything")


def _name_of(arguments: Sequence[str], index: int) -> str:
    """Return the option to which a redacted argument belongs, else its position."""
    name, sign, _ = arguments[index].partition("=")
    if sign and _NAMED.fullmatch(name):
        return name
    before = arguments[index - 1] if index else ""
    return before if before.startswith("-") else f"argument {index + 1}"
