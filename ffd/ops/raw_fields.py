"""The overflow document of an execution: namespace, kind and tags, under FlowFabric's names.

Documents may come from other writers, so reading is forgiving: what is missing or of another type is empty.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec


class RawFields(msgspec.Struct, frozen=True):
    """What ffd reads of `ff_exec_core.raw_fields`."""

    namespace: str = ""
    execution_kind: str = ""
    tags: dict[str, str] = {}


_DECODER: Final = msgspec.json.Decoder(RawFields)


def encode_raw_fields(namespace: str, kind: str, tags: dict[str, str]) -> str:
    """The document of a new execution."""
    document: dict[str, Any] = {"namespace": namespace, "execution_kind": kind}
    if tags:
        document["tags"] = tags
    return msgspec.json.encode(document).decode()


def read_raw_fields(text: str) -> RawFields:
    """Decode a stored document."""
    try:
        return _DECODER.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        document = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        # Numbers or nesting beyond what Python can hold: the work itself is not affected.
        return RawFields()
    if not isinstance(document, dict):
        return RawFields()
    tags = document.get("tags")
    return RawFields(
        _text(document.get("namespace")),
        _text(document.get("execution_kind")),
        {key: _text(value) for key, value in tags.items()} if isinstance(tags, dict) else {},
    )


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else msgspec.json.encode(value).decode()
