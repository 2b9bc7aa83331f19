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

from ffd.core.checks import check_lane, check_text
from ffd.core.errors import Validation, ValidationKind
from ffd.core.ids import ExecutionKey, attempt_id_text, lease_uuid, parse_execution_id, parse_uuid
from ffd.core.limits import LEASE_TTL_MS_MAX


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


Fence = tuple[int, UUID, int, int]


class Lease(NamedTuple):
    """What the opaque bytes of a handle say."""

    partition_key: int
    execution_id: UUID
    attempt_index: int
    lease_epoch: int
    lease_ttl_ms: int
    lane: str
    worker_instance_id: str
    given_ids: tuple[str, str] | None = None

    @property
    def key(self) -> ExecutionKey:
        """Where the execution lives."""
        return ExecutionKey(self.partition_key, self.execution_id)

    @property
    def fence(self) -> Fence:
        """What every owner's write names: execution, attempt and epoch. Sorts in lock order."""
        return self[:4]

    @property
    def attempt_id(self) -> str:
        """The attempt's id, as the handle gives it or as it follows from the other fields."""
        return self.given_ids[0] if self.given_ids else attempt_id_text(self.execution_id, self.attempt_index)

    @property
    def lease_id(self) -> str:
        """The lease's id in uuid form."""
        if self.given_ids:
            return self.given_ids[1]
        return str(lease_uuid(self.execution_id, self.attempt_index, self.lease_epoch))


class Handle:
    """A worker's hold on one attempt. Pass it back to the engine; store it with `encode`.

    Immutable; equal when backend, kind and opaque bytes are. The bytes of a handle that never leaves its process
    are never built: minting one costs nothing on the path of a claim.
    """

    __slots__ = ("_lease", "_opaque", "backend", "kind")

    backend: Backend
    kind: HandleKind
    _lease: Lease | None
    _opaque: bytes | None

    def __init__(self, backend: Backend, kind: HandleKind, opaque: bytes) -> None:
        _set(self, "backend", backend)
        _set(self, "kind", kind)
        _set(self, "_opaque", opaque)
        _set(self, "_lease", None)

    @classmethod
    def of_lease(cls, kind: HandleKind, lease: Lease) -> Handle:
        """The handle of a lease that the database has just granted."""
        handle = cls.__new__(cls)
        _set(handle, "backend", Backend.POSTGRES)
        _set(handle, "kind", kind)
        _set(handle, "_opaque", None)
        _set(handle, "_lease", lease)
        return handle

    @property
    def opaque(self) -> bytes:
        """The lease in FlowFabric's layout."""
        if self._opaque is None and self._lease is not None:
            _set(self, "_opaque", encode_opaque(self._lease))
        return self._opaque  # type: ignore[return-value]  # one of the two is always there

    @property
    def lease(self) -> Lease:
        """What the opaque bytes say; malformed ones raise, as in `decode`."""
        if self._lease is None:
            _set(self, "_lease", _read_opaque(self.backend, self._opaque))
        return self._lease  # type: ignore[return-value]  # set just above

    def encode(self) -> bytes:
        """The kind byte and the opaque bytes."""
        if self.kind not in _KIND_BYTES or not isinstance(self.opaque, bytes):
            raise _corrupt("not a handle that the engine made")
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

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a handle cannot be changed: {name}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Handle):
            return NotImplemented
        return (self.backend, self.kind, self.opaque) == (other.backend, other.kind, other.opaque)

    def __hash__(self) -> int:
        return hash((self.backend, self.kind, self.opaque))

    def __repr__(self) -> str:
        return f"Handle(backend={str(self.backend)!r}, kind={str(self.kind)!r}, opaque={self.opaque!r})"

    def __reduce__(self) -> tuple[type[Handle], tuple[Backend, HandleKind, bytes]]:
        return (Handle, (self.backend, self.kind, self.opaque))


_set = object.__setattr__


def _corrupt(detail: str) -> Validation:
    return Validation(ValidationKind.CORRUPTION, detail, "handle")


def encode_opaque(lease: Lease) -> bytes:
    """The reference's version 2 layout: little-endian integers, strings with a 32-bit length in front."""
    execution, attempt, lease_id = str(lease.key).encode(), lease.attempt_id.encode(), lease.lease_id.encode()
    lane, instance = lease.lane.encode(), lease.worker_instance_id.encode()
    pack = _LENGTH.pack
    return b"".join(
        (
            _HEADER,
            pack(len(execution)),
            execution,
            pack(lease.attempt_index),
            pack(len(attempt)),
            attempt,
            pack(len(lease_id)),
            lease_id,
            _EPOCH_AND_TTL.pack(lease.lease_epoch, lease.lease_ttl_ms),
            pack(len(lane)),
            lane,
            pack(len(instance)),
            instance,
        )
    )


def read_lease(handle: Handle) -> Lease:
    """The lease in a handle that the caller presented; refuses another backend's and anything malformed."""
    if not isinstance(handle, Handle):
        raise _corrupt("expected a Handle")
    return handle.lease


def _read_opaque(backend: str, opaque: object) -> Lease:
    if backend != Backend.POSTGRES:
        raise _other_backend(backend)
    if not isinstance(opaque, bytes) or len(opaque) < 3 or opaque[:2] != _HEADER[:2]:
        raise _corrupt("not a handle: wrong magic or version")
    if opaque[2] != _HEADER[2]:
        other = _BACKENDS.get(opaque[2])
        raise _corrupt(f"unknown backend tag {opaque[2]}") if other is None else _other_backend(other)
    try:
        return _parse(opaque)
    except (struct.error, UnicodeDecodeError):
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
    try:
        check_lane(lane)
        check_text(worker_instance_id, "worker_instance_id")
        key = parse_execution_id(execution_id)
        parse_uuid(attempt_id, "attempt_id")
        parse_uuid(lease_id, "lease_id")
    except Validation:
        raise _corrupt("an id or the lane is malformed") from None
    return Lease(
        key.partition_key,
        key.execution_id,
        attempt_index,
        lease_epoch,
        lease_ttl_ms,
        lane,
        worker_instance_id,
        (attempt_id, lease_id),
    )
