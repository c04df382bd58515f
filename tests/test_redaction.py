"""Secrets in arguments, variables and texts are replaced; what only resembles one stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

from backlight.records import Fingerprint
from backlight.redaction import Redaction, check_patterns
from fake_secrets import Fake, catalogue

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
        "--author joe --keyboard x --sort-key=name",
        "--auth=false --lr 3e-4 -v train.txt s3://bucket/key",
        "--passes 3 --session-length 5 --betas 0.9,0.999 --m mixtral8x7b",
        "--model meta-llama/Llama-3.1-8B-Instruct --arch vit_base_patch16_224.augreg_in21k_ft_in1k",
        "--target Qwen2VLForConditionalGeneration --cfg configs/resnet50_8xb32_in1k.py --ds wmt14en2de",
        "--dtype fp8_e4m3fn --name run-20240101T120000Z --freeze ^encoder.*$ --master_addr=10.0.0.1:29500",
        "--num-key-value-heads 8 --experiment ablation_lr3e4_bs256_wd01 --data /d/part-0001-of-1024.h5",
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
    assert Redaction().text(text) == (f"401 for https://{HIDDEN}@c, token={HIDDEN}, Authorization: {HIDDEN}")
    given = {"AWS_SECRET_ACCESS_KEY": "x", "HUB_TOKEN": "q", "MY_KEY": "k", "PLAIN": "x"}
    assert [*Redaction().variables(given).values()] == [HIDDEN, HIDDEN, HIDDEN, "x"]


FAKES = catalogue()


def test_catalogue_is_large() -> None:
    assert len({fake.secret for fake in FAKES}) == len(FAKES) >= 150


@pytest.mark.parametrize("fake", FAKES, ids=lambda fake: " ".join(fake.arguments)[:40])
def test_no_part_of_a_secret_is_kept(fake: Fake) -> None:
    shown = [" ".join(Redaction().arguments(fake.arguments)), Redaction().text(f"HTTP 401: {fake.arguments}")]
    parts = [fake.secret[i : i + 9] for i in range(max(1, len(fake.secret) - 8))]
    assert [part for part in parts for text in shown if part in text] == []


def test_arguments_are_kept_on_request() -> None:
    given = [argument for fake in FAKES for argument in fake.arguments]
    assert list(Redaction(keeps_arguments=True).arguments(given)) == given


LINEAR = """
import resource
from backlight.redaction import Redaction
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
for unit in (
    "a", "a.", "a-", "a=", "a= ", "a=[", "token=1", "token", "api_key", " ", ":", "a: ", "://", "://a:",
    "?sig=", "eyJ", "eyJaaaaaaaa.", "hf_", "sk-", "Bearer ", "Basic ", "0", "aA0", "a1-", '"a": "', "['",
    "-", "--pw ", "-----BEGIN ", "00000000-", "//hooks.", "{", "auth", "pass",
):
    text = unit * (60_000 // len(unit))
    Redaction().text(text)
    Redaction().arguments([text, "--" + text, "--x=" + text, "--key", text])
"""


@pytest.mark.slow
def test_redaction_is_linear_in_the_length_of_an_argument() -> None:
    done = subprocess.run([sys.executable, "-c", LINEAR], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or "its processor time of 30 s is used up"


def test_patterns_are_checked() -> None:
    with pytest.raises(ValueError, match=r"redact: '\(' is no regular expression"):
        check_patterns(["("])
    with pytest.raises(ValueError, match="matches the empty text"):
        check_patterns(["x*"])
