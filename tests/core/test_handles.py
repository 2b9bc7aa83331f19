"""Handles: the reference's bytes, and nothing else accepted."""

from __future__ import annotations

import pickle
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffd import Backend, Handle, HandleKind, Validation, ValidationKind
from ffd.core.handles import Lease

VECTOR = bytes.fromhex(
    "0201022b0000007b66703a377d3a31313131313131312d313131312d343131312d383131312d313131313131313131313131"
    "010000002400000033333333333333332d333333332d343333332d383333332d333333333333333333333333"
    "2400000034343434343434342d343434342d343434342d383434342d343434343434343434343434"
    "030000000000000030750000000000000700000064656661756c740b00000070672d776f726b65722d31"
)
KINDS = {1: HandleKind.FRESH, 2: HandleKind.RESUMED, 3: HandleKind.RECLAIMED, 4: HandleKind.SUSPENDED}


def test_the_reference_vector_decodes_to_its_fields() -> None:
    lease = Handle.decode(b"\x01" + VECTOR).lease
    assert len(VECTOR) == 176
    assert str(lease.key) == "{fp:7}:11111111-1111-4111-8111-111111111111"
    assert (lease.attempt_index, lease.lease_epoch, lease.lease_ttl_ms) == (1, 3, 30_000)
    assert lease.attempt_id == "33333333-3333-4333-8333-333333333333"
    assert lease.lease_id == "44444444-4444-4444-8444-444444444444"
    assert (lease.lane, lease.worker_instance_id) == ("default", "pg-worker-1")


@pytest.mark.parametrize(("byte", "kind"), KINDS.items())
def test_decode_is_the_exact_inverse_of_encode(byte: int, kind: HandleKind) -> None:
    """C-296."""
    encoded = bytes([byte]) + VECTOR
    handle = Handle.decode(encoded)
    assert handle.kind == kind
    assert handle.backend == Backend.POSTGRES
    assert handle.encode() == encoded
    assert Handle.decode(handle.encode()) == handle


def test_a_minted_handle_survives_its_bytes() -> None:
    lease = Lease(7, UUID("11111111-1111-4111-8111-111111111111"), 2, 9, 1000, "a lane", "wi-1")
    handle = Handle.of_lease(HandleKind.RESUMED, lease)
    again = Handle.decode(handle.encode())
    assert again == handle
    assert hash(again) == hash(handle)
    assert again.lease[:7] == lease[:7]
    assert again.lease.lease_id == lease.lease_id
    assert pickle.loads(pickle.dumps(handle)) == handle


def test_a_handle_cannot_be_changed() -> None:
    handle = Handle.decode(b"\x01" + VECTOR)
    with pytest.raises(AttributeError):
        handle.kind = HandleKind.FRESH


@pytest.mark.parametrize("tag", [1, 3])
def test_another_backends_handle_has_a_kind_of_its_own(tag: int) -> None:
    """C-297."""
    other = b"\x01" + VECTOR[:2] + bytes([tag]) + VECTOR[3:]
    with pytest.raises(Validation) as refused:
        Handle.decode(other)
    assert refused.value.kind == ValidationKind.HANDLE_FROM_OTHER_BACKEND


def _replaced(at: int, data: bytes) -> bytes:
    return b"\x01" + VECTOR[:at] + data + VECTOR[at + len(data) :]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"\x00" + VECTOR,
        b"\x05" + VECTOR,
        b"\x01" + VECTOR[:-1],
        b"\x01" + VECTOR + b"\x00",
        _replaced(0, b"\x01"),
        _replaced(1, b"\x02"),
        _replaced(2, b"\x09"),
        _replaced(3, b"\xff\xff\xff\xff"),
        _replaced(7, b"X"),
        _replaced(12, b"Z"),
        _replaced(7, b"\xff"),
        _replaced(50, b"\xff\xff\xff\xff"),
        _replaced(142, b"\xff" * 8),
        _replaced(134, b"\xff" * 8),
        "text",
        None,
        7,
    ],
)
def test_garbage_is_corruption(data: object) -> None:
    with pytest.raises(Validation) as refused:
        Handle.decode(data)  # type: ignore[arg-type]  # that is the point
    assert refused.value.kind == ValidationKind.CORRUPTION
    assert refused.value.field == "handle"


@given(st.binary(max_size=300))
def test_any_bytes_either_decode_or_are_refused(data: bytes) -> None:
    try:
        handle = Handle.decode(data)
    except Validation as refused:
        assert refused.kind in (ValidationKind.CORRUPTION, ValidationKind.HANDLE_FROM_OTHER_BACKEND)
    else:
        assert handle.encode() == data


@given(st.integers(0, 176), st.binary(min_size=1, max_size=8))
def test_a_damaged_handle_decodes_to_itself_or_is_refused(at: int, noise: bytes) -> None:
    data = _replaced(at, noise)
    try:
        handle = Handle.decode(data)
    except Validation as refused:
        assert refused.kind in (ValidationKind.CORRUPTION, ValidationKind.HANDLE_FROM_OTHER_BACKEND)
    else:
        assert handle.encode() == data
