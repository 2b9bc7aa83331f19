"""Waitpoint tokens: proof that whoever sends a signal was given the right to (I8).

A token is ``<kid>:<64 hex digits>``, the HMAC-SHA256 of ``<kid>:<execution>:<waitpoint>`` under the key `kid`. It
proves itself: no row is needed to check it, so a wrong one gets the same answer whatever exists behind it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final

from ffd.core.errors import Validation, ValidationKind

_TOKEN: Final = re.compile(r"([^:\x00-\x1f\x7f\ud800-\udfff]{1,64}):([0-9a-f]{64})")
_SECRET_HEX: Final = re.compile(r"[0-9a-fA-F]{64}")
_KID: Final = re.compile(r"[^:\x00-\x1f\x7f\ud800-\udfff]{1,64}")
# Compared against when there is no such key, so that an unknown kid takes as long as a known one.
_NO_SECRET: Final = b"\0" * 32


def invalid_token() -> Validation:
    """The one answer to every token that does not hold, whatever is wrong with it."""
    return Validation(ValidationKind.INVALID_TOKEN, "the token does not authorise this signal", "token")


def check_kid(kid: object, field: str = "kid") -> str:
    """A key's name: 1..64 characters, no colon, no control characters."""
    if not isinstance(kid, str) or _KID.fullmatch(kid) is None:
        raise Validation(
            ValidationKind.INVALID_KID, "expected 1..64 characters without colon and control characters", field
        )
    return str.__str__(kid)


def check_secret_hex(secret_hex: object, field: str = "secret_hex") -> bytes:
    """A secret: 64 hex digits. The error never repeats it."""
    if not isinstance(secret_hex, str) or _SECRET_HEX.fullmatch(secret_hex) is None:
        raise Validation(ValidationKind.INVALID_SECRET_HEX, "expected 64 hex digits", field)
    return bytes.fromhex(secret_hex)


def _mac(kid: str, secret: bytes, execution_id: str, waitpoint_id: str) -> str:
    message = f"{kid}:{execution_id}:{waitpoint_id}".encode()
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def mint_token(kid: str, secret: bytes, execution_id: str, waitpoint_id: str) -> str:
    """The token of one waitpoint of one execution."""
    return f"{kid}:{_mac(kid, secret, execution_id, waitpoint_id)}"


def token_kid(token: object) -> str | None:
    """The key that a token names; None when it is not even shaped like one."""
    match = _TOKEN.fullmatch(token) if isinstance(token, str) else None
    return None if match is None else match[1]


def fingerprint(token: str) -> str:
    """What listings show instead of a token: the first 16 digits of its MAC."""
    return token.rpartition(":")[2][:16]


def verify_token(token: object, secret: bytes | None, execution_id: str, waitpoint_id: str) -> bool:
    """Whether the token was minted with `secret` for this waitpoint; in constant time for its content."""
    kid = token_kid(token)
    expected = _mac(kid or "", secret or _NO_SECRET, execution_id, waitpoint_id)
    presented = str(token).rpartition(":")[2] if kid is not None else "0" * 64
    is_equal = hmac.compare_digest(expected, presented)
    return is_equal and kid is not None and secret is not None
