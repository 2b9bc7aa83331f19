"""Checks of callers' input. Each raises a `Validation` that names the field and the bound; nothing is repaired.

(The one exception is the priority, which the contract clamps.)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from ffd.core.errors import Validation, ValidationKind
from ffd.core.limits import (
    CAPABILITIES_BYTES_MAX,
    CAPABILITIES_MAX,
    ID_BYTES_MAX,
    LANE_BYTES_MAX,
    PRIORITY_MAX,
    PRIORITY_MIN,
    TAG_KEY_BYTES_MAX,
    TAG_VALUE_BYTES_MAX,
    TAGS_MAX,
    TIME_MS_MAX,
)

_LANE: Final = re.compile(rf"[\x20-\x7e]{{1,{LANE_BYTES_MAX}}}")
_CAPABILITY: Final = re.compile(r"[^\x00-\x20,\x7f]+")
_TAG_KEY: Final = re.compile(r"[a-z][a-z0-9_]*\.[a-z0-9_][a-z0-9_.]*")


def _bad(field: str, detail: str, kind: ValidationKind = ValidationKind.INVALID_INPUT) -> Validation:
    return Validation(kind, detail, field)


def check_lane(lane: object, field: str = "lane") -> str:
    """A lane: 1..64 printable ASCII characters."""
    if not isinstance(lane, str) or _LANE.fullmatch(lane) is None:
        raise _bad(field, f"expected 1..{LANE_BYTES_MAX} printable ASCII characters")
    return str(lane)


def check_text(text: object, field: str, bytes_max: int = ID_BYTES_MAX, *, may_be_empty: bool = False) -> str:
    """A text of bounded size without the NUL character, which PostgreSQL cannot store."""
    if not isinstance(text, str):
        raise _bad(field, "expected text")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _bad(field, "expected text that UTF-8 can encode (no lone surrogates)") from None
    if size > bytes_max or (not size and not may_be_empty) or "\0" in text:
        low = 0 if may_be_empty else 1
        raise _bad(field, f"expected {low}..{bytes_max} bytes of text without NUL")
    # A subclass of str is taken at its value: encoders downstream know only the real one.
    return text if type(text) is str else str.__str__(text)


def check_bytes(data: object, field: str, bytes_max: int) -> bytes:
    """A bounded byte string."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise _bad(field, "expected bytes")
    try:
        data = bytes(data)
    except ValueError:
        raise _bad(field, "the memoryview has been released") from None
    if len(data) > bytes_max:
        raise _bad(field, f"{len(data)} bytes, at most {bytes_max} are allowed", ValidationKind.PAYLOAD_TOO_LARGE)
    return data


def check_int(value: object, field: str, low: int, high: int) -> int:
    """An integer between two bounds; booleans are not integers here."""
    if type(value) is not int or not low <= value <= high:
        raise _bad(field, f"expected an integer in {low}..{high}")
    return value


def check_time_ms(value: object, field: str) -> int:
    """A point in time, in milliseconds since the epoch."""
    return check_int(value, field, 1, TIME_MS_MAX)


def clamp_priority(priority: object) -> int:
    """A priority, moved into 0..9000."""
    if type(priority) is not int:
        raise _bad("priority", "expected an integer")
    return min(max(priority, PRIORITY_MIN), PRIORITY_MAX)


def check_capabilities(tokens: object, field: str) -> list[str]:
    """A set of capability tokens, sorted and without repeats (the claim index keys on the sorted list)."""
    kind = ValidationKind.INVALID_CAPABILITIES
    # Sized, so that an endless iterator is refused and not walked.
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Collection):
        raise _bad(field, "expected a sequence of tokens", kind)
    unique = set()
    for token in tokens:
        if not isinstance(token, str) or _CAPABILITY.fullmatch(token) is None:
            raise _bad(
                field,
                "each token must be non-empty text without comma, white space or control characters",
                kind,
            )
        unique.add(check_text(token, field, CAPABILITIES_BYTES_MAX))
    if len(unique) > CAPABILITIES_MAX:
        raise _bad(field, f"{len(unique)} tokens, at most {CAPABILITIES_MAX} are allowed", kind)
    if sum(len(token.encode()) + 1 for token in unique) > CAPABILITIES_BYTES_MAX + 1:
        raise _bad(field, f"more than {CAPABILITIES_BYTES_MAX} bytes of tokens", kind)
    return sorted(unique)


def check_tag_key(key: object, field: str = "tags") -> str:
    """A tag key: a namespace, a dot, then letters, digits, underscores and dots."""
    if not isinstance(key, str) or _TAG_KEY.fullmatch(key) is None or len(key) > TAG_KEY_BYTES_MAX:
        raise _bad(
            field,
            f"a key must look like namespace.name (lower case, digits, underscores; {TAG_KEY_BYTES_MAX} bytes)",
            ValidationKind.INVALID_TAG_KEY,
        )
    return str.__str__(key)


def check_tags(tags: object) -> dict[str, str]:
    """At most 64 tags with valid keys and bounded values."""
    if tags is None:
        return {}
    if not isinstance(tags, Mapping):
        raise _bad("tags", "expected a mapping of text to text")
    if len(tags) > TAGS_MAX:
        raise _bad("tags", f"{len(tags)} tags, at most {TAGS_MAX} are allowed")
    return {
        check_tag_key(key): check_text(value, f"tags[{key}]", TAG_VALUE_BYTES_MAX, may_be_empty=True)
        for key, value in tags.items()
    }
