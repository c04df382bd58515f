"""Secrets in arguments and variables: recognised by name or shape, and replaced before anything is stored."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backlight.records import Fingerprint
from backlight.settings import SettingError

REDACTED = "<redacted>"

NAME = (
    r"api[-_.]?keys?|access[-_.]?keys?|(?:private|secret|signing|encryption|license|account)[-_.]?keys?"
    r"|(?:wandb|comet|neptune|hf|huggingface|openai|anthropic|github|slack|aws|azure|gcp)[-_.]?keys?"
    r"|secrets?|pass(?:word|wd|phrase|code)s?|pwd|creds?|credentials?|auth(?:orization|entication)?|oauth2?"
    r"|bearer|jwt|cookies?|webhook(?:[-_.]?url)?|dsn|conn(?:ection)?[-_.]?str(?:ing)?|hmac|otp|totp"
    r"|private[-_.]?pem|session[-_.]?(?:id|key)|(?:access|auth|api|bearer|refresh|hub)[-_.]?tokens"
)
"""Words of names whose values are secrets, whatever comes before or after them."""

TOKEN = r"(?<!pad.)(?<!bos.)(?<!eos.)(?<!unk.)(?<!sep.)(?<!cls.)(?<!mask.)(?<!per.)(?<!special.)token"
"""The word that ends a name whose value is a secret, other than tokens of a text."""

LAST = (
    r"(?<!forward.)(?<!backward.)(?<!multi.)(?<!single.)(?<!num.)pass|pw|session|signature|sig|sas|pin"
    r"|(?<!sort.)(?<!group.)(?<!image.)(?<!text.)(?<!label.)(?<!target.)(?<!input.)(?<!output.)(?<!data.)"
    r"(?<!feature.)(?<!metric.)(?<!batch.)(?<!monitor.)(?<!join.)(?<!primary.)(?<!foreign.)(?<!caption.)"
    r"(?<!audio.)(?<!video.)keys?"
)
"""Words that end a name whose value is a secret, other than keys of data."""

PREFIXES = (
    r"gh[pousr]_|github_pat_|gl(?:pat|rt|dt|ptt|oas)-|xox[abeprs]-|xapp-|[spr]k_(?:live|test)_|whsec_|sk-"
    r"|AKIA|ASIA|AIza|ya29\.|GOCSPX-|1//0|npm_|pypi-|dop_v1_|SG\.|shp(?:at|ca|pa|ss)_|lin_api_|ntn_|figd_"
    r"|ATATT|ATCTT|dckr_(?:pat|oat)_|hv[sbr]\.|r8_|gsk_|xai-|pplx-|nvapi-|sntry[su]_|NRAK-|dapi|PMAK-|EAAC"
    r"|rubygems_|AGE-SECRET-KEY-|glsa_|sbp_|jina_|tvly-|lsv2_|phc_|wandb_v1_|CFPAT-|HRKU-|tskey-|tgp_v1_"
)
"""Beginnings of the tokens of common services, followed by at least 10 characters of a token."""

SHAPES = (
    rf"(?<![\w-])(?:hf_[A-Za-z0-9]{{16,}}|(?:{PREFIXES})[\w+/=.-]{{10,}})",
    r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?",
    r"(?<=://)[^\s/@]{1,512}(?=@)",
    r"(?<=//hooks\.)[^\s\"']+|(?<=/webhooks/)[^\s\"']+|(?<=/services/)T[^\s\"']+",
    r"(?<=Bearer )\S+|(?<=Basic )[\w+/=-]{6,}",
    r"(?<![\w-])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![\w-])",
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*",
)
"""Shapes of values that are secrets under any name; each is linear in the length of a text."""

_NAME = re.compile(rf"(?<![a-z0-9])(?:{NAME})(?![a-z0-9])", re.IGNORECASE)
_LAST = re.compile(rf"(?<![a-z0-9])(?:{LAST})$", re.IGNORECASE)
_TOKEN = re.compile(rf"(?<![a-z0-9]){TOKEN}$", re.IGNORECASE)
_SWITCH = re.compile(r"(?:true|false|none|null)?", re.IGNORECASE)
_OF_TEXT = re.compile(r"[\d.eE+-]*|<.*>|\[.*\]")
_SHAPE = re.compile("|".join(SHAPES), re.DOTALL)
_NAMED = re.compile(r"[-+~]*[\w.\-/@]+")
_INSIDE = re.compile(
    r"""(?<![\w.\-])(?P<name>[\w.\-]+)(?:["']?\s*[:=]\s*|(?P<gap>["']?,?\s+))(?P<quote>["']?)"""
)
_VALUE = re.compile(
    r"""(?:(?:Basic|Bearer|Digest|Token|ApiKey|Negotiate)\s+)?(?:\[[^\[\]]*\]?|[^"',{}&;\s]+)"""
)
_RUN = re.compile(r"[A-Za-z0-9]{8,}")
_NO_SECRET = re.compile(r"0x[0-9a-fA-F]{1,16}|\d{8}T\d{4,6}Z?|\d+(?:x\d+)*")
_PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_LONG = 16
_MAX_SHORT_BORDERS = 4  # as of "mixtral8x7b" and "wmt14en2de"


@dataclass(frozen=True)
class Redaction:
    """Replaces secrets; ``patterns`` are regular expressions for further names and parts of values.

    ``keeps_arguments``: arguments stay as they are.
    """

    patterns: tuple[str, ...] = ()
    keeps_arguments: bool = False

    def is_secret(self, name: str, value: str) -> bool:
        """Return whether the value of an option or variable of this name is a secret."""
        if _SWITCH.fullmatch(value):
            return False
        kind = self._kind(name)
        # The number of a token, or one of a vocabulary such as <image>, is none.
        return kind == "secret" or (kind == "token" and _OF_TEXT.fullmatch(value) is None)

    def text(self, text: str) -> str:
        """Return a text without the secrets that have a name or a known shape in it, or look random."""
        text = self._by_shape(text)
        out, end = [], 0
        for match in _INSIDE.finditer(text):
            is_option = match["name"].startswith("-")  # `--password X`, `['--password', 'X']`
            if match.start() < end or (match["gap"] and not is_option) or not self._kind(match["name"]):
                continue
            begin, quote = match.end(), match["quote"]
            if quote:
                stop = text.find(quote, begin)
                stop = len(text) if stop < 0 else stop
            else:
                value = _VALUE.match(text, begin)
                stop = begin if value is None else value.end()
            if stop > begin and self.is_secret(match["name"], text[begin:stop]):
                out += [text[end:begin], REDACTED]
                end = stop
        return _RUN.sub(_unless_random, "".join([*out, text[end:]]))

    def variables(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables with redacted values."""
        return {k: REDACTED if self.is_secret(k, v) else self.text(v) for k, v in values.items()}

    def arguments(self, words: Sequence[str]) -> tuple[str, ...]:
        """Return the arguments of a script with redacted values."""
        if self.keeps_arguments:
            return tuple(words)
        out: list[str] = []
        owner = ""  # the option that takes the argument
        for argument in words:
            name, sign, value = argument.partition("=")
            is_option = re.match(r"--?[A-Za-z]", argument) is not None
            if owner and not is_option and self.is_secret(owner, argument):
                out.append(REDACTED)  # whatever it holds: base64 ends in "="
                owner = owner if owner.endswith("s") else ""  # `--api-keys A B`
            elif sign and _NAMED.fullmatch(name):
                shown = REDACTED if self.is_secret(name, value) else self.text(value)
                out.append(f"{_plain(name)}={shown}")
                owner = ""
            else:
                out.append(_plain(argument) if is_option else self.text(argument))
                owner = argument if is_option else ""
        return tuple(out)

    def fingerprint(self, record: Fingerprint) -> Fingerprint:
        """Return a fingerprint with redacted arguments, and the names of those in ``redacted``."""
        arguments = self.arguments(record.arguments)
        if arguments == record.arguments:
            return record
        names = [
            _name_of(arguments, i) for i, pair in enumerate(zip(arguments, record.arguments, strict=True))
            if pair[0] != pair[1]
        ]  # fmt: skip
        return dataclasses.replace(record, arguments=arguments, redacted=tuple(dict.fromkeys(names)))

    def _kind(self, name: str) -> str:
        """Return ``secret``, ``token`` for one unless it is of a text, or an empty text, by a name."""
        plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
        if _NAME.search(plain) or _LAST.search(plain) or re.fullmatch(r"[A-Z0-9_]*(?:KEY|TOKEN|PASS)", name):
            return "secret"
        if any(re.search(pattern, name) for pattern in self.patterns):
            return "secret"
        return "token" if _TOKEN.search(plain) else ""

    def _by_shape(self, text: str) -> str:
        text = _SHAPE.sub(REDACTED, text)
        for pattern in self.patterns:
            text = re.sub(pattern, REDACTED, text)
        return text


def _plain(option: str) -> str:
    """Return the name of an option without what has the shape of a secret, as one glued to it."""
    return _RUN.sub(_unless_random, _SHAPE.sub(REDACTED, option))


def _unless_random(match: re.Match[str]) -> str:
    return REDACTED if _is_random(match[0]) else match[0]


def _is_random(word: str) -> bool:
    """Return whether letters and digits alternate as those of no name of a model, file or option do."""
    if _NO_SECRET.fullmatch(word):
        return False
    borders = sum(a.isdigit() != b.isdigit() for a, b in itertools.pairwise(word))
    pieces = len(_PIECE.findall(word))
    if len(word) < _LONG:
        is_mixed = word not in {word.lower(), word.upper()}
        return borders > _MAX_SHORT_BORDERS or (is_mixed and pieces > _MAX_SHORT_BORDERS)
    return borders >= 3 or len(word) < 2.5 * pieces or (len(word) >= 2 * _LONG and pieces <= 2)


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
