"""Signals as they are stored: blobs in a suspension's member_map, or buffered on their waitpoint.

The shape is FlowFabric's, with a sequence number beside it, because milliseconds tie. Reading is forgiving: a blob
that cannot be understood is passed over, as FlowFabric does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ffd.core.conditions import SeenSignal
from ffd.core.suspension import ResumeSignal, Signal

MemberMap = dict[str, list[dict[str, Any]]]


def signal_blob(signal: Signal, signal_id: str, accepted_at_ms: int, seq: int) -> dict[str, Any]:
    """A signal to store."""
    return {
        "signal_id": signal_id,
        "signal_name": signal.name,
        "signal_category": signal.category,
        "source_type": signal.source_type,
        "source_identity": signal.source_identity,
        "correlation_id": signal.correlation_id or "",
        "accepted_at": accepted_at_ms,
        "payload_hex": None if signal.payload is None else signal.payload.hex(),
        "seq": seq,
    }


def read_member_map(text: str | None) -> MemberMap:
    """The signals of a suspension by waitpoint key."""
    document = msgspec.json.decode(text) if text else {}
    if not isinstance(document, dict):
        return {}
    return {key: _blobs(value) for key, value in document.items()}


def read_buffered(text: str | None) -> list[dict[str, Any]]:
    """The signals that wait on a waitpoint."""
    return _blobs(msgspec.json.decode(text)) if text else []


def _blobs(value: object) -> list[dict[str, Any]]:
    return [blob for blob in value if isinstance(blob, dict)] if isinstance(value, list) else []


def encode(document: object) -> str:
    """JSON text for a jsonb parameter."""
    return msgspec.json.encode(document).decode()


def seen(member_map: Mapping[str, Iterable[dict[str, Any]]]) -> dict[str, list[SeenSignal]]:
    """What conditions look at."""
    return {
        key: [SeenSignal(*(str(blob.get(field) or "") for field in SeenSignal.__struct_fields__)) for blob in blobs]
        for key, blobs in member_map.items()
    }


def has_signal(member_map: MemberMap, signal_id: str) -> bool:
    """Whether a signal of this id is stored."""
    return any(blob.get("signal_id") == signal_id for blobs in member_map.values() for blob in blobs)


def resume_signals(member_map: MemberMap) -> list[ResumeSignal]:
    """Every signal in the order of arrival."""
    blobs = [blob for blobs in member_map.values() for blob in blobs if blob.get("signal_id")]
    blobs.sort(key=lambda blob: (_number(blob.get("seq")), _number(blob.get("accepted_at"))))
    return [
        ResumeSignal(
            str(blob["signal_id"]),
            str(blob.get("signal_name") or ""),
            str(blob.get("signal_category") or ""),
            str(blob.get("source_type") or ""),
            str(blob.get("source_identity") or ""),
            str(blob.get("correlation_id") or "") or None,
            _number(blob.get("accepted_at")),
            _payload(blob.get("payload_hex")),
        )
        for blob in blobs
    ]


def _number(value: object) -> int:
    return value if type(value) is int else 0


def _payload(value: object) -> bytes | None:
    try:
        return bytes.fromhex(value) if isinstance(value, str) else None
    except ValueError:
        return None
