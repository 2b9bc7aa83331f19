"""Identifiers and partition arithmetic, with the vectors of the reference."""

from __future__ import annotations

from uuid import UUID

import pytest

from ffd import Validation, ValidationKind
from ffd.core.ids import (
    attempt_id_text,
    crc16,
    lease_id_text,
    lease_uuid,
    new_execution_key,
    parse_execution_id,
    parse_lease_id,
    partition_of,
)

ONES = UUID("11111111-1111-4111-8111-111111111111")


def test_crc16_has_the_check_value_of_xmodem() -> None:
    assert crc16(b"123456789") == 0x31C3
    assert crc16(b"default") == 54870


@pytest.mark.parametrize(("lane", "partition"), [("default", 86), ("workers-a", 193), ("gpu", 144), ("email", 28)])
def test_crc16_matches_the_reference_vectors(lane: str, partition: int) -> None:
    assert crc16(lane.encode()) % 256 == partition


@pytest.mark.parametrize(("uuid", "partition"), [(ONES, 191), (UUID("00000000-0000-4000-8000-000000000001"), 186)])
def test_a_uuid_lies_in_the_partition_of_its_bytes(uuid: UUID, partition: int) -> None:
    assert partition_of(uuid) == partition


def test_an_execution_id_reads_back() -> None:
    key = parse_execution_id(f"{{fp:7}}:{ONES}")
    assert key == (7, ONES)
    assert str(key) == f"{{fp:7}}:{ONES}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{fp:7}",
        f"{{fp:-1}}:{ONES}",  # C-041
        f"{{fp:256}}:{ONES}",
        f"{{fp:65535}}:{ONES}",
        f"{{fp:07}}:{ONES}",
        f"{{b:7}}:{ONES}",
        "{fp:7}:not-a-uuid",
        f"{{fp:7}}:{ONES} ",
        f"{{fp:7}}:{ONES.hex}",
        f"{{fp:٧}}:{ONES}",  # noqa: RUF001  (a digit, but not an ASCII one)
        None,
        7,
        b"{fp:7}",
    ],
)
def test_a_malformed_execution_id_is_refused_by_name(text: object) -> None:
    with pytest.raises(Validation) as refused:
        parse_execution_id(text)
    assert refused.value.kind == ValidationKind.INVALID_INPUT
    assert refused.value.field == "execution_id"


def test_solo_executions_spread_over_the_partitions() -> None:
    partitions = {new_execution_key().partition_key for _ in range(5000)}
    assert len(partitions) == 256


def test_new_ids_sort_by_age() -> None:
    ids = [new_execution_key(3).execution_id for _ in range(1000)]
    assert ids == sorted(ids)


def test_lease_ids_name_one_lease() -> None:
    assert lease_id_text(ONES, 2, 9) == f"pg:{ONES}:2:9"
    assert parse_lease_id(f"pg:{ONES}:2:9") == (ONES, 2, 9)
    assert parse_lease_id("pg:nonsense") is None
    # The uuid form: epoch folded into bytes 0 to 7, attempt into bytes 8 to 11.
    assert lease_uuid(ONES, 2, 9) == UUID("11111111-1111-4118-8111-111311111111")


def test_an_attempt_keeps_its_id_and_the_next_has_another() -> None:
    assert attempt_id_text(ONES, 0) == "11111111-1111-4111-8111-111111111110"
    assert attempt_id_text(ONES, 0) != attempt_id_text(ONES, 1)
    assert str(UUID(attempt_id_text(ONES, 2**31 - 1))) == attempt_id_text(ONES, 2**31 - 1)
