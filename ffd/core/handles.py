"""Handles: what a worker holds to prove that an attempt is its own.

The opaque bytes have the reference's layout, so that handles can pass between implementations. A handle is not
a secret and not signed: the fence is the epoch in the database, a forged handle gains what its forger could
have claimed anyway.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from ffd.core.errors import Validation, ValidationKind
from ffd.core.ids import ExecutionKey, attempt_uuid, lease_uuid, parse_execution_id, parse_uuid
from ffd.core.limits import ID_BYTES_MAX, LANE_BYTES_MAX, LEASE_TTL_MS_MAX


class Backend(StrEnum):
    """Which implementation minted a handle."""

    VALKEY = "valkey"
    POSTGRES = "postgres"
    SQLITE = "sqlite"


class HandleKind(StrEnum):
    """How the worker came by its lease."""

    FRESH = "fresh"
    RESUMED = "resumed"
    RECLAIMED = "reclaimed"
    SUSPENDED = "suspended"


_KIND_BYTES: Final = {
    HandleKind.FRESH: b"\x01",
    HandleKind.RESUMED: b"\x02",
    HandleKind.RECLAIMED: b"\x03",
    HandleKind.SUSPENDED: b"\x04",
}
_KINDS: Final = {byte[0]: kind for kind, byte in _KIND_BYTES.items()}
_BACKENDS: Final = {1: Backend.VALKEY, 2: Backend.POSTGRES, 3: Backend.SQLITE}

_HEADER: Final = b"\x02\x01\x02"  # magic, version, backend tag of PostgreSQL
_LENGTH: Final = struct.Struct("<I")
_EPOCH_AND_TTL: Final = struct.Struct("<QQ")
_INT4_MAX: Final = 2**31 - 1
_INT8_MAX: Final = 2**63 - 1


class Lease(NamedTuple):
    """What the opaque bytes of a handle say."""

    partition_key: int
    execution_id: UUID
    attempt_index: int
    lease_epoch: int
    lease_ttl_ms: int
    lane: str
    worker_instance_id: str
    attempt_id: str
    lease_id: str

    @property
    def key(self) -> ExecutionKey:
        """Where the execution lives."""
        return ExecutionKey(self.partition_key, self.execution_id)


class Handle(msgspec.Struct, frozen=True):
    """A worker's hold on one attempt. Pass it back to the engine; store it with `encode`."""

    backend: Backend
    kind: HandleKind
    opaque: bytes

    def encode(self) -> bytes:
        """The kind byte and the opaque bytes."""
        return _KIND_BYTES[self.kind] + self.opaque

    @classmethod
    def decode(cls, data: bytes) -> Handle:
        """The exact inverse of `encode`; everything is parsed, anything malformed is `Validation(CORRUPTION)`."""
        if not isinstance(data, bytes | bytearray | memoryview) or len(data) < 1:
            raise _corrupt("expected the bytes of Handle.encode()")
        data = bytes(data)
        kind = _KINDS.get(data[0])
        if kind is None:
            raise _corrupt(f"unknown kind byte {data[0]}")
        handle = cls(Backend.POSTGRES, kind, data[1:])
        read_lease(handle)
        return handle


def _corrupt(detail: str) -> Validation:
    return Validation(ValidationKind.CORRUPTION, detail, "handle")


def mint_handle(
    key: ExecutionKey,
    attempt_index: int,
    lease_epoch: int,
    lease_ttl_ms: int,
    lane: str,
    worker_instance_id: str,
    kind: HandleKind,
) -> Handle:
    """The handle of a lease just taken. Attempt id and lease id follow from the other fields."""
    attempt_id = attempt_uuid(key.execution_id, attempt_index)
    lease_id = lease_uuid(key.execution_id, attempt_index, lease_epoch)
    return Handle(
        Backend.POSTGRES,
        kind,
        encode_opaque(
            str(key),
            attempt_index,
            str(attempt_id),
            str(lease_id),
            lease_epoch,
            lease_ttl_ms,
            lane,
            worker_instance_id,
        ),
    )


def encode_opaque(
    execution_id: str,
    attempt_index: int,
    attempt_id: str,
    lease_id: str,
    lease_epoch: int,
    lease_ttl_ms: int,
    lane: str,
    worker_instance_id: str,
) -> bytes:
    """The reference's version 2 layout: little-endian integers, strings with a 32-bit length in front."""
    execution, attempt, lease = execution_id.encode(), attempt_id.encode(), lease_id.encode()
    lane_bytes, instance = lane.encode(), worker_instance_id.encode()
    pack = _LENGTH.pack
    return b"".join(
        (
            _HEADER,
            pack(len(execution)),
            execution,
            pack(attempt_index),
            pack(len(attempt)),
            attempt,
            pack(len(lease)),
            lease,
            _EPOCH_AND_TTL.pack(lease_epoch, lease_ttl_ms),
            pack(len(lane_bytes)),
            lane_bytes,
            pack(len(instance)),
            instance,
        )
    )


def read_lease(handle: Handle) -> Lease:
    """Parse a handle that the caller presented; refuses another backend's and anything malformed."""
    if not isinstance(handle, Handle):
        raise _corrupt("expected a Handle")
    if handle.backend != Backend.POSTGRES:
        raise _other_backend(handle.backend)
    opaque = handle.opaque
    if not isinstance(opaque, bytes) or len(opaque) < 3 or opaque[:2] != _HEADER[:2]:
        raise _corrupt("not a handle: wrong magic or version")
    if opaque[2] != _HEADER[2]:
        other = _BACKENDS.get(opaque[2])
        raise _corrupt(f"unknown backend tag {opaque[2]}") if other is None else _other_backend(other)
    try:
        return _parse(opaque)
    except (struct.error, UnicodeDecodeError, IndexError):
        raise _corrupt("truncated or not UTF-8") from None


def _other_backend(backend: str) -> Validation:
    return Validation(
        ValidationKind.HANDLE_FROM_OTHER_BACKEND,
        f"minted by the {backend} backend, not by postgres",
        "handle",
    )


def _string(opaque: bytes, at: int) -> tuple[str, int]:
    (length,) = _LENGTH.unpack_from(opaque, at)
    end = at + 4 + length
    if end > len(opaque):
        raise _corrupt("truncated")
    return opaque[at + 4 : end].decode(), end


def _parse(opaque: bytes) -> Lease:
    execution_id, at = _string(opaque, 3)
    (attempt_index,) = _LENGTH.unpack_from(opaque, at)
    attempt_id, at = _string(opaque, at + 4)
    lease_id, at = _string(opaque, at)
    lease_epoch, lease_ttl_ms = _EPOCH_AND_TTL.unpack_from(opaque, at)
    lane, at = _string(opaque, at + 16)
    worker_instance_id, at = _string(opaque, at)
    if at != len(opaque):
        raise _corrupt("trailing bytes")
    if attempt_index > _INT4_MAX or lease_epoch > _INT8_MAX or not 1 <= lease_ttl_ms <= LEASE_TTL_MS_MAX:
        raise _corrupt("a number is out of range")
    if not 1 <= len(lane.encode()) <= LANE_BYTES_MAX:
        raise _corrupt("the lane is out of range")
    if not 1 <= len(worker_instance_id.encode()) <= ID_BYTES_MAX:
        raise _corrupt("the worker instance id is out of range")
    try:
        key = parse_execution_id(execution_id)
        parse_uuid(attempt_id, "attempt_id")
        parse_uuid(lease_id, "lease_id")
    except Validation:
        raise _corrupt("an id is malformed") from None
    return Lease(
        key.partition_key,
        key.execution_id,
        attempt_index,
        lease_epoch,
        lease_ttl_ms,
        lane,
        worker_instance_id,
        attempt_id,
        lease_id,
    )
