"""Secrets in arguments, variables and texts are replaced; what only resembles one stays."""

from __future__ import annotations

import pytest

from backlight.records import Fingerprint
from backlight.redaction import Redaction, check_patterns

HIDDEN = "<redacted>"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("--api-key=abc --lr 3", f"--api-key={HIDDEN} --lr 3"),
        ("--api_key abc data.yaml", f"--api_key {HIDDEN} data.yaml"),
        ("--wandbKey s --apikey=1", f"--wandbKey {HIDDEN} --apikey={HIDDEN}"),
        ("--password 12345", f"--password {HIDDEN}"),
        ("--api-keys a b --x 1", f"--api-keys {HIDDEN} {HIDDEN} --x 1"),
        ("+trainer.password=x wandb.api_key=y", f"+trainer.password={HIDDEN} wandb.api_key={HIDDEN}"),
        ('--config {"api_key":"abc","lr":1}', f'--config {{"api_key":"{HIDDEN}","lr":1}}'),
        ("--hub-token hf_abcdefghijklmnopqrst", f"--hub-token {HIDDEN}"),
        ("ghp_abcdefghijklmnopqrstuvwxyz", HIDDEN),
        ("--data s3://user:word@host/x", f"--data s3://{HIDDEN}@host/x"),
        ("https://h/x?sig=abc&y=1", f"https://h/x?sig={HIDDEN}&y=1"),
        ("--my-passport 7 --note=passport7", f"--my-passport {HIDDEN} --note={HIDDEN}7"),
    ],
)
def test_secrets_are_replaced(given: str, kept: str) -> None:
    assert " ".join(Redaction(("passport",)).arguments(given.split())) == kept


@pytest.mark.parametrize(
    "given",
    [
        "--max-tokens 100 --num_tokens=5 --tokenizer gpt2 --tokens 7",
        "--pad-token </s>x --eos_token=<eos> --image-token <image> --token 12",
        "--author joe --keyboard x --key label --sort-key=name",
        "--auth=false --lr 3e-4 -v train.txt s3://bucket/key",
        "0123456789abcdef0123456789abcdef01234567",
    ],
)
def test_other_arguments_stay(given: str) -> None:
    assert " ".join(Redaction().arguments(given.split())) == given


def test_fingerprint_names_what_was_redacted() -> None:
    given = Fingerprint(arguments=("--api-key=a", "--token", "b", "hf_abcdefghijklmnopqrst", "--lr", "1"))
    found = Redaction().fingerprint(given)
    assert found.redacted == ("--api-key", "--token", "argument 4")
    assert Redaction().fingerprint(found) == found
    plain = Fingerprint(arguments=("--lr", "1"))
    assert Redaction().fingerprint(plain) is plain


def test_secrets_in_texts_and_variables() -> None:
    text = "401 for https://a:b@c, token=abc, Authorization: Bearer zzz"
    assert Redaction().text(text) == (
        f"401 for https://{HIDDEN}@c, token={HIDDEN}, Authorization: {HIDDEN} {HIDDEN}"
    )
    given = {"AWS_SECRET_ACCESS_KEY": "x", "HUB_TOKEN": "q", "MY_KEY": "k", "PLAIN": "x"}
    assert [*Redaction().variables(given).values()] == [HIDDEN, HIDDEN, HIDDEN, "x"]


def test_patterns_are_checked() -> None:
    with pytest.raises(ValueError, match=r"redact: '\(' is no regular expression"):
        check_patterns(["("])
    with pytest.raises(ValueError, match="matches the empty text"):
        check_patterns(["x*"])
