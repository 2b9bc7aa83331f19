"""Tokens: the construction of reference §2.4.1, and one answer to everything that does not hold (I8)."""

from __future__ import annotations

import hmac
import inspect
from typing import Any

import pytest

from ffd import Validation, ValidationKind
from ffd.core import tokens
from ffd.core.tokens import (
    check_kid,
    check_secret_hex,
    fingerprint,
    invalid_token,
    mint_token,
    token_kid,
    verify_token,
)

EXECUTION = "{fp:7}:11111111-1111-4111-8111-111111111111"
WAITPOINT = "22222222-2222-4222-8222-222222222222"
SECRET = b"\0" * 32
MAC = "f4a572d290b54532108c9f28e0eb5a261fd6bc94a4a5137ec96327cd1a2f1125"
TOKEN = f"kid1:{MAC}"

# What is not a token of this waitpoint, each for a reason of its own.
BAD_TOKENS: dict[str, Any] = {
    "none": None,
    "empty": "",
    "a number": 5,
    "bytes": TOKEN.encode(),
    "no colon": "kid1" + MAC,
    "no kid": f":{MAC}",
    "no mac": "kid1:",
    "kid only": "kid1",
    "truncated": TOKEN[:-1],
    "one digit more": TOKEN + "0",
    "tampered": TOKEN[:-1] + "6",
    "upper case": f"kid1:{MAC.upper()}",
    "not hex": f"kid1:{'g' * 64}",
    "another kid": f"kid2:{MAC}",
    "two colons": f"kid1::{MAC}",
    "a colon in the kid": f"kid:1:{MAC}",
    "newline at the end": TOKEN + "\n",
    "space in front": " " + TOKEN,
    "NUL in the kid": f"kid\0:{MAC}",
    "huge": "x" * 1_000_000,
    "huge mac": "kid1:" + "0" * 1_000_000,
    "huge kid": "k" * 1_000_000 + f":{MAC}",
    "non-ASCII": "ключ:" + "ж" * 64,
    "non-ASCII kid": f"ключ:{MAC}",
    "non-ASCII digits": f"kid1:{'٣' * 64}",
    "a lone surrogate": f"\ud800:{MAC}",
    "an emoji": f"🔑:{MAC}",
}
bad_tokens = pytest.mark.parametrize("token", BAD_TOKENS.values(), ids=BAD_TOKENS.keys())


def test_the_vector_of_the_reference() -> None:
    assert mint_token("kid1", SECRET, EXECUTION, WAITPOINT) == TOKEN
    assert verify_token(TOKEN, SECRET, EXECUTION, WAITPOINT)


def test_a_token_holds_for_its_waitpoint_its_execution_and_its_secret_only() -> None:
    """V-001, V-003, V-004, V-007, C-128."""
    other = "22222222-2222-4222-8222-222222222223"
    assert not verify_token(TOKEN, SECRET, EXECUTION, other)
    assert not verify_token(TOKEN, SECRET, EXECUTION.replace("fp:7", "fp:8"), WAITPOINT)
    assert not verify_token(TOKEN, SECRET, EXECUTION.replace("8111", "8112"), WAITPOINT)
    assert not verify_token(TOKEN, b"\1" * 32, EXECUTION, WAITPOINT)
    assert not verify_token(TOKEN, None, EXECUTION, WAITPOINT)
    # The kid is signed too: the same secret under another name is another key.
    assert not verify_token(f"kid2:{MAC}", SECRET, EXECUTION, WAITPOINT)


def test_no_flipped_digit_passes() -> None:
    for at in range(len("kid1:"), len(TOKEN)):
        digit = "0" if TOKEN[at] != "0" else "1"
        assert not verify_token(TOKEN[:at] + digit + TOKEN[at + 1 :], SECRET, EXECUTION, WAITPOINT)


@bad_tokens
@pytest.mark.parametrize("secret", [SECRET, None], ids=["key", "no_key"])
def test_a_malformed_token_never_holds_and_never_raises(token: Any, secret: bytes | None) -> None:
    """V-002, V-003."""
    assert verify_token(token, secret, EXECUTION, WAITPOINT) is False


def test_a_token_signed_with_the_stand_in_for_a_missing_key_does_not_hold() -> None:
    """32 zero bytes are what a missing key is compared with: knowing that opens nothing."""
    assert mint_token("gone", b"\0" * 32, EXECUTION, WAITPOINT)
    assert not verify_token(mint_token("gone", b"\0" * 32, EXECUTION, WAITPOINT), None, EXECUTION, WAITPOINT)


@pytest.mark.parametrize("token", [TOKEN, TOKEN[:-1] + "6", None, "x", f"nobody:{MAC}"])
@pytest.mark.parametrize("secret", [SECRET, None], ids=["key", "no_key"])
def test_every_verification_compares_64_digits_in_constant_time(
    monkeypatch: pytest.MonkeyPatch, token: Any, secret: bytes | None
) -> None:
    """I8: one `compare_digest` of equal lengths whatever is presented, and no other comparison of a MAC."""
    compared: list[tuple[str, str]] = []

    def compare(a: str, b: str) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    spied = type("Hmac", (), {"compare_digest": staticmethod(compare), "new": staticmethod(hmac.new)})
    monkeypatch.setattr(tokens, "hmac", spied)
    verify_token(token, secret, EXECUTION, WAITPOINT)
    assert [(len(a), len(b)) for a, b in compared] == [(64, 64)]
    source = inspect.getsource(verify_token)
    assert "==" not in source
    assert "!=" not in source


@pytest.mark.parametrize(
    ("token", "kid"),
    [(TOKEN, "kid1"), (f"ключ:{MAC}", "ключ"), ("kid1:", None), (None, None), (f"a:b:{MAC}", None)],
)
def test_the_kid_is_what_stands_before_the_only_colon(token: Any, kid: str | None) -> None:
    assert token_kid(token) == kid


def test_a_fingerprint_is_16_digits_of_the_mac() -> None:
    """C-007, reference §2.4.3."""
    assert fingerprint(TOKEN) == MAC[:16]


@pytest.mark.parametrize("kid", ["k", "kid-1", "ключ", "k" * 64, "2026-01 (prod)"])
def test_kids_of_1_to_64_characters_are_taken(kid: str) -> None:
    assert check_kid(kid) == kid
    assert token_kid(mint_token(kid, SECRET, EXECUTION, WAITPOINT)) == kid


@pytest.mark.parametrize("kid", ["", "a:b", ":", "k" * 65, "k\n", "k\0", "\x7f", None, 5, b"kid", "\ud800"])
def test_a_bad_kid_is_named(kid: Any) -> None:
    """V-015."""
    with pytest.raises(Validation) as refused:
        check_kid(kid)
    assert (refused.value.kind, refused.value.field) == (ValidationKind.INVALID_KID, "kid")


@pytest.mark.parametrize(
    "secret", ["", "ab" * 31, "ab" * 33, "zz" * 32, "ab" * 31 + "a", None, 5, b"ab" * 32, "٣" * 64]
)
def test_a_bad_secret_is_refused_and_never_repeated(secret: Any) -> None:
    """C-116, V-012, V-015."""
    with pytest.raises(Validation) as refused:
        check_secret_hex(secret)
    assert (refused.value.kind, refused.value.field) == (ValidationKind.INVALID_SECRET_HEX, "secret_hex")
    assert not secret or str(secret) not in f"{refused.value!s}{refused.value!r}"


def test_secrets_are_64_hex_digits_of_either_case() -> None:
    assert check_secret_hex("AB" * 32) == check_secret_hex("ab" * 32) == b"\xab" * 32


def test_the_answer_to_a_bad_token_says_nothing_of_it() -> None:
    error = invalid_token()
    assert (error.kind, error.field, error.code) == (ValidationKind.INVALID_TOKEN, "token", "validation.invalid_token")
    assert not error.is_retryable
    assert (str(error), repr(error)) == (str(invalid_token()), repr(invalid_token()))
