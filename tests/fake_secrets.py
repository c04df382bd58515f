"""Catalogue of command lines with fake secrets, each assembled here from a fixed seed: none is real."""

from __future__ import annotations

import base64
import random
import string
from dataclasses import dataclass

ALPHANUMERIC = string.ascii_letters + string.digits
HEX = "0123456789abcdef"


@dataclass(frozen=True)
class Fake:
    """``arguments`` of a script that hold ``secret``."""

    arguments: tuple[str, ...]
    secret: str


def catalogue() -> list[Fake]:
    """Return the shapes: by name of an option, by service, in texts, headers, addresses and structures."""
    rng = random.Random(20240101)

    def of(alphabet: str, length: int) -> str:
        # As in any real token, each kind of character occurs.
        return "a7" + "".join(rng.choices(alphabet, k=length - 4)) + ("Q4" if "Q" in alphabet else "e1")

    def word() -> str:
        return "sesame" + "".join(rng.choices(string.ascii_lowercase, k=6))

    fakes: list[Fake] = []

    def add(secret: str, *arguments: str) -> None:
        fakes.append(Fake(tuple(a.replace("$", secret) for a in arguments), secret))

    names = (
        "pw", "pass", "password", "passwd", "passphrase", "passcode", "pwd", "db-pass", "user_pass",
        "jwt", "session",
        "session-id", "oauth", "oauth2", "oauth-token", "key", "keys", "api-key", "api_key", "apikey",
        "apiKey",
        "access-key", "secret-access-key", "private-key", "signing-key", "encryption-key", "license-key",
        "fernet-key",
        "master-key", "ssh-key", "consumer-key", "wandb-key", "wandb_api_key", "secret", "client-secret",
        "token",
        "hub-token", "auth-token", "access-tokens", "refresh-tokens", "credentials", "cred", "creds",
        "auth",
        "authorization", "bearer", "cookie", "webhook", "webhook-url", "dsn", "connection-string",
        "conn-str", "signature",
        "sig", "sas", "pin", "otp", "hmac", "trainer.logger.api_key", "AWS_SECRET_ACCESS_KEY", "MY_KEY",
        "DB_PASS",
    )  # fmt: skip
    for name in names:
        add(word(), f"--{name}", "$")
    for name in names[:12]:
        add(word(), f"--{name}=$")
    for name in ("api-key", "token", "password", "pw", "sas", "connection-string"):  # values that hold "="
        add(base64.b64encode(rng.randbytes(31)).decode(), f"--{name}", "$")
    add("Server=tcp:db,1433;Pwd=" + word(), "--connection-string", "$")
    add("AccountKey=" + base64.b64encode(rng.randbytes(32)).decode(), "--dsn", "$")

    services = {
        "hf_": 34, "ghp_": 36, "gho_": 36, "ghs_": 36, "github_" + "pat_": 60, "glpat-": 20, "xoxb-": 40,
        "xoxp-": 40,
        "xapp-": 40, "sk-": 48, "sk-" + "proj-": 60, "sk_" + "live_": 24, "rk_" + "live_": 24,
        "whsec_": 32, "npm_": 36,
        "pypi-": 60, "dop_v1_": 64, "SG.": 66, "shpat_": 32, "lin_api_": 40, "ntn_": 40, "figd_": 40,
        "ATATT": 60,
        "dckr_" + "pat_": 27, "hvs.": 24, "r8_": 37, "gsk_": 50, "xai-": 60, "pplx-": 40, "nvapi-": 60,
        "ya29.": 60,
        "GOCSPX-": 28, "tvly-": 32, "lsv2_": 40, "phc_": 40, "glsa_": 40, "tskey-": 30, "NRAK-": 27,
        "AIza": 35,
    }  # fmt: skip
    for prefix, length in services.items():
        add(prefix + of(ALPHANUMERIC, length), "$")
    add("AKIA" + "".join(rng.choices(string.ascii_uppercase + "234567", k=16)), "--note", "$")
    add("dapi" + of(HEX, 32), "--host-note=$")
    for length in (32, 40, 64):
        add(of(HEX, length), "--wandb", "$")
    add(f"{of(HEX, 8)}-{of(HEX, 5)[:4]}-{of(HEX, 5)[:4]}-{of(HEX, 5)[:4]}-{of(HEX, 12)}", "--client", "$")
    add(of(ALPHANUMERIC, 24), "--other", "$")
    part = of(ALPHANUMERIC, 30)
    add(part, f"eyJ{of(ALPHANUMERIC, 20)}.$.{of(ALPHANUMERIC, 43)}")

    add(base64.b64encode(b"user:" + word().encode()).decode(), "-H", "Authorization: Basic $")
    add(of(ALPHANUMERIC, 30), "-H", "Authorization: Bearer $")
    add(word(), "--header", "X-Api-Key: $")
    add(word(), "--header", "Cookie: session=$")
    add(word(), "--header=Authorization: Token $")

    for text in (
        '{"api_key": "$"}', '{"api_keys": ["$", "b"]}', '{"a": {"password":"$"}}', "{'token': '$'}",
        "{password: $}",
        '{"db": {"pw": "$", "port": 1}}', '[{"name": "x", "secret": "$"}]', "api_keys=[$,b]",
        "wandb={key:$}",
        'password="$ and more"',
    ):  # fmt: skip
        add(word(), "--config", text)
    for form in ("--env=DB_PASSWORD=$", "--env=MY_KEY=$", "-e=HUB_TOKEN=$", "+env.PASSWORD=$", "env.X.PW=$"):
        add(word(), form)
    add(word(), "--env", "DB_PASSWORD=$")
    add(word(), "-e", "API_TOKEN=$")

    for url in (
        "postgres://user:$@host/db", "https://$@host/x", "redis://:$@host:6379/0",
        "mongodb+srv://u:$@h/d?w=1",
        "https://h/x?password=$", "https://h/x?a=1&token=$&b=2", "https://h/x?sig=$&se=2030",
        "https://h/x#access_token=$",
        "jdbc:postgresql://h/d?user=a&password=$",
    ):  # fmt: skip
        add(word(), "--url", url)
    for url in (
        "https://b.s3.amazonaws.com/k?X-Amz-Algorithm=A&X-Amz-Signature=$",
        "https://h/x?X-Goog-Signature=$",
        "https://h/x?Policy=$", "https://hooks.slack.com/services/T0000/B0000/$",
        "https://discord.com/api/webhooks/1234567890/$", "https://hooks.zapier.com/hooks/catch/1/$",
        "https://h/in/$",
    ):  # fmt: skip
        add(of(ALPHANUMERIC, 32), f"--target={url}")
    add(word(), "--alert", "https://hooks.slack.com/services/T0/B0/$")
    return fakes
