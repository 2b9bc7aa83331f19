"""Identifiers: their text forms, and the arithmetic that maps them to partitions.

An execution travels as ``{fp:N}:<uuid>`` and is stored as ``partition_key = N`` and the bare uuid. Everything
derived from it (lease id, attempt id) is computed, never stored, so that two places cannot disagree.
"""

from __future__ import annotations

import re
from binascii import crc_hqx
from typing import Final, NamedTuple
from uuid import UUID

from uuid_utils.compat import uuid7

from ffd.core.errors import Validation, ValidationKind
from ffd.core.limits import PARTITIONS

_EXECUTION_ID: Final = re.compile(r"\{fp:(0|[1-9][0-9]{0,2})\}:([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})")
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_LEASE_ID: Final = re.compile(r"pg:([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}):([0-9]{1,10}):([0-9]{1,19})")


class ExecutionKey(NamedTuple):
    """Where an execution lives: the first two columns of every primary key. Sorts in lock order."""

    partition_key: int
    execution_id: UUID

    def __str__(self) -> str:
        return f"{{fp:{self.partition_key}}}:{self.execution_id}"


def crc16(data: bytes) -> int:
    """CRC16-XMODEM: polynomial 0x1021, start 0, nothing reflected; 0x31C3 for the digits 1 to 9."""
    return crc_hqx(data, 0)


def partition_of(uuid: UUID) -> int:
    """The partition of a flow or of a solo execution."""
    return crc16(uuid.bytes) % PARTITIONS


def new_uuid() -> UUID:
    """A fresh identifier that sorts by the time it was made."""
    return uuid7()


def new_execution_key(partition_key: int | None = None) -> ExecutionKey:
    """Mint an execution: in its flow's partition when that is given, else spread by its own uuid."""
    uuid = uuid7()
    return ExecutionKey(partition_of(uuid) if partition_key is None else partition_key, uuid)


def parse_execution_id(text: object, field: str = "execution_id") -> ExecutionKey:
    """Read the wire form ``{fp:N}:<uuid>`` with N in 0..255."""
    match = _EXECUTION_ID.fullmatch(text) if isinstance(text, str) else None
    if match is None or int(match[1]) >= PARTITIONS:
        raise Validation(
            ValidationKind.INVALID_INPUT,
            f"expected {{fp:N}}:<uuid> with N in 0..{PARTITIONS - 1}",
            field,
        )
    return ExecutionKey(int(match[1]), UUID(match[2]))


def parse_uuid(text: object, field: str) -> UUID:
    """Read a bare uuid in its canonical text form."""
    if isinstance(text, str) and _UUID.fullmatch(text) is not None:
        return UUID(text)
    raise Validation(ValidationKind.INVALID_INPUT, "expected a uuid such as 0190…-…-…-…-…", field)


def lease_id_text(uuid: UUID, attempt_index: int, lease_epoch: int) -> str:
    """The textual lease id, as operators and events name it."""
    return f"pg:{uuid}:{attempt_index}:{lease_epoch}"


def parse_lease_id(text: str) -> tuple[UUID, int, int] | None:
    """The uuid, attempt index and epoch in a textual lease id; None for any other text."""
    match = _LEASE_ID.fullmatch(text)
    return None if match is None else (UUID(match[1]), int(match[2]), int(match[3]))


def lease_uuid(uuid: UUID, attempt_index: int, lease_epoch: int) -> UUID:
    """The lease id in uuid form, as the handle carries it: epoch and attempt folded into the execution's uuid."""
    return UUID(int=uuid.int ^ (lease_epoch << 64) ^ (attempt_index << 32))


def attempt_id_text(uuid: UUID, attempt_index: int) -> str:
    """The attempt id: the same for every claim of one attempt, another for the next attempt."""
    text = str(uuid)
    return f"{text[:24]}{int(text[24:], 16) ^ (attempt_index + 1):012x}"
