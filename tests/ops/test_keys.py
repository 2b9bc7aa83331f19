"""Signing keys: one signs, retired ones verify until their own grace ends, and no secret is ever shown."""

from __future__ import annotations

from typing import Any

import pytest

from ffd import (
    Accepted,
    AlreadySeeded,
    Claim,
    Conflict,
    ConflictKind,
    Count,
    CountKind,
    EngineError,
    Fresh,
    Noop,
    Rotated,
    Seeded,
    Signal,
    Suspend,
    Suspended,
    Validation,
    ValidationKind,
    WaitpointKey,
)
from ffd.core.tokens import mint_token, verify_token
from tests.support import Clock, Rig

pytestmark = pytest.mark.anyio

A, B, C = "aa" * 32, "bb" * 32, "cc" * 32


async def keys(rig: Rig) -> list[tuple[str, bytes, bool]]:
    rows = await rig.sql.fetch("select kid, secret, active from ff_waitpoint_hmac order by kid")
    return [(row["kid"], row["secret"], row["active"]) for row in rows]


async def suspended(rig: Rig) -> tuple[Claim, Suspended]:
    """An execution that goes on taking signals."""
    claim = await rig.running()
    outcome = await rig.engine.suspend(
        claim.handle, Suspend([Fresh("a")], Count(1000, CountKind.DISTINCT_SIGNALS, ("a",)))
    )
    assert isinstance(outcome, Suspended)
    return claim, outcome


async def holds(rig: Rig, claim: Claim, outcome: Suspended) -> bool:
    """Whether the outcome's token still authorises a signal."""
    (point,) = outcome.waitpoints
    signal = Signal(claim.execution_id, point.waitpoint_id, "x", point.token, source_type="test", source_identity="t")
    try:
        return isinstance(await rig.engine.deliver_signal(signal), Accepted)
    except Validation as error:
        assert error.kind == ValidationKind.INVALID_TOKEN
        return False


async def test_seeding_installs_the_key_that_signs(rig: Rig) -> None:
    """C-112."""
    assert await rig.engine.seed_waitpoint_hmac_secret("kid-seed", C) == Seeded("kid-seed")
    assert await keys(rig) == [("kid-seed", b"\xcc" * 32, True)]
    _, outcome = await suspended(rig)
    assert outcome.waitpoints[0].token.startswith("kid-seed:")


async def test_seeding_the_same_key_again_says_that_the_secret_is_the_same(rig: Rig) -> None:
    """C-113."""
    await rig.engine.seed_waitpoint_hmac_secret("kid-seed", C)
    before = await keys(rig)
    for secret in (C, C.upper()):
        assert await rig.engine.seed_waitpoint_hmac_secret("kid-seed", secret) == AlreadySeeded("kid-seed", True)
    assert await keys(rig) == before


async def test_seeding_the_same_kid_with_another_secret_says_so_and_changes_nothing(rig: Rig) -> None:
    """C-114."""
    await rig.engine.seed_waitpoint_hmac_secret("kid-seed", A)
    assert await rig.engine.seed_waitpoint_hmac_secret("kid-seed", B) == AlreadySeeded("kid-seed", False)
    assert await keys(rig) == [("kid-seed", b"\xaa" * 32, True)]


async def test_seeding_beside_a_key_that_signs_is_refused(rig: Rig) -> None:
    """C-115."""
    await rig.engine.seed_waitpoint_hmac_secret("kid-one", A)
    with pytest.raises(Validation) as refused:
        await rig.engine.seed_waitpoint_hmac_secret("kid-two", B)
    assert (refused.value.field, B in str(refused.value)) == ("kid", False)
    assert [kid for kid, _, _ in await keys(rig)] == ["kid-one"]


async def test_the_first_rotation_has_no_predecessor(rig: Rig) -> None:
    """C-109."""
    assert await rig.engine.rotate_waitpoint_hmac_secret_all("kid-1", "11" * 32, 0) == Rotated(None, "kid-1", 0)
    assert await keys(rig) == [("kid-1", b"\x11" * 32, True)]


async def test_rotating_to_the_same_key_again_is_a_noop(rig: Rig) -> None:
    """C-110; a key that is retired but still there is not brought back by it either."""
    await rig.engine.rotate_waitpoint_hmac_secret_all("kid-1", A, 1000)
    assert await rig.engine.rotate_waitpoint_hmac_secret_all("kid-1", A, 5) == Noop("kid-1")
    await rig.engine.rotate_waitpoint_hmac_secret_all("kid-2", B, 1000)
    before = await keys(rig)
    assert await rig.engine.rotate_waitpoint_hmac_secret_all("kid-2", B, 1000) == Noop("kid-2")
    assert await keys(rig) == before == [("kid-1", b"\xaa" * 32, False), ("kid-2", b"\xbb" * 32, True)]


async def test_rotating_to_a_known_kid_with_another_secret_is_a_conflict(rig: Rig) -> None:
    """C-111."""
    await rig.engine.rotate_waitpoint_hmac_secret_all("kid-1", A, 0)
    with pytest.raises(Conflict) as refused:
        await rig.engine.rotate_waitpoint_hmac_secret_all("kid-1", B, 0)
    assert refused.value.kind == ConflictKind.ROTATION_CONFLICT
    assert await keys(rig) == [("kid-1", b"\xaa" * 32, True)]


async def test_tokens_of_the_previous_key_hold_until_its_grace_ends(rig: Rig, clock: Clock) -> None:
    """C-117, C-286, V-005, V-006; new suspensions are signed by the new key."""
    await rig.engine.seed_waitpoint_hmac_secret("kid-v1", "cafebabe" * 8)
    claim, outcome = await suspended(rig)
    token = outcome.waitpoints[0].token
    secret = bytes.fromhex("cafebabe" * 8)
    assert token == mint_token("kid-v1", secret, claim.execution_id, outcome.waitpoints[0].waitpoint_id)
    assert await rig.engine.rotate_waitpoint_hmac_secret_all("kid-v2", "00" * 32, 1000) == Rotated(
        "kid-v1", "kid-v2", 0
    )
    assert not verify_token(token, secret, claim.execution_id, "22222222-2222-4222-8222-222222222222")
    await clock.advance(999)
    assert await holds(rig, claim, outcome)
    _, newer = await suspended(rig)
    assert newer.waitpoints[0].token.startswith("kid-v2:")
    await clock.advance(1)
    assert not await holds(rig, claim, outcome)


async def test_two_rotations_within_the_grace_break_no_token(rig: Rig, clock: Clock) -> None:
    """V-010: every retired key has its own end, there is no ring of two."""
    await rig.engine.seed_waitpoint_hmac_secret("a", A)
    of_a = await suspended(rig)
    await rig.engine.rotate_waitpoint_hmac_secret_all("b", B, 10_000)
    of_b = await suspended(rig)
    await clock.advance(4000)
    await rig.engine.rotate_waitpoint_hmac_secret_all("c", C, 1000)
    of_c = await suspended(rig)
    assert [await holds(rig, *one) for one in (of_a, of_b, of_c)] == [True, True, True]
    await clock.advance(1000)
    assert [await holds(rig, *one) for one in (of_a, of_b, of_c)] == [True, False, True]
    await clock.advance(5000)
    assert [await holds(rig, *one) for one in (of_a, of_b, of_c)] == [False, False, True]


async def test_rapid_rotation_without_grace_breaks_tokens_at_once(rig: Rig, clock: Clock) -> None:
    """V-011."""
    await rig.engine.seed_waitpoint_hmac_secret("a", A)
    of_a = await suspended(rig)
    await rig.engine.rotate_waitpoint_hmac_secret_all("b", B, 0)
    assert not await holds(rig, *of_a)
    await rig.engine.rotate_waitpoint_hmac_secret_all("c", C, 0)
    assert not await holds(rig, *of_a)


async def test_keys_past_their_grace_are_dropped_by_the_next_rotation(rig: Rig, clock: Clock) -> None:
    """V-013, V-014: the listing leaves them out even before."""
    for at, kid in enumerate("abcd"):
        assert await rig.engine.rotate_waitpoint_hmac_secret_all(kid, f"{at:064x}", 1000) == Rotated(
            "abcd"[at - 1] if at else None, kid, 0
        )
    await clock.advance(1000)
    assert [key.kid for key in await rig.engine.list_waitpoint_keys()] == ["d"]
    assert len(await keys(rig)) == 4
    assert await rig.engine.rotate_waitpoint_hmac_secret_all("e", "ee" * 32, 1000) == Rotated("d", "e", 3)
    assert [kid for kid, _, _ in await keys(rig)] == ["d", "e"]


async def test_keys_are_listed_without_their_secrets(rig: Rig, clock: Clock) -> None:
    """V-014: the one that signs first, then those that verify and until when."""
    assert await rig.engine.list_waitpoint_keys() == []
    await rig.engine.seed_waitpoint_hmac_secret("a", A)
    start = await clock.now_ms()
    await clock.advance(5)
    await rig.engine.rotate_waitpoint_hmac_secret_all("b", B, 1000)
    listed = await rig.engine.list_waitpoint_keys()
    assert listed == [WaitpointKey("b", True, start + 5, None), WaitpointKey("a", False, start, start + 1005)]
    assert WaitpointKey.__struct_fields__ == ("kid", "is_active", "rotated_at_ms", "verifies_until_ms")
    for secret in (A, B, repr(bytes.fromhex(A)), repr(bytes.fromhex(B))):
        assert secret not in repr(listed)


async def test_a_key_retired_by_flowfabric_verifies_without_end(rig: Rig, clock: Clock) -> None:
    """Its rotation stores no end, and its tokens are in the field."""
    await rig.engine.seed_waitpoint_hmac_secret("ff", A)
    one = await suspended(rig)
    await rig.sql.execute("update ff_waitpoint_hmac set active = false")
    await rig.engine.seed_waitpoint_hmac_secret("new", B)
    await clock.advance(10**12)
    assert await holds(rig, *one)
    assert [key.kid for key in await rig.engine.list_waitpoint_keys()] == ["new", "ff"]
    assert await rig.engine.rotate_waitpoint_hmac_secret_all("newer", C, 0) == Rotated("new", "newer", 0)


BAD: list[tuple[Any, Any, Any, str]] = [
    ("", A, 0, "kid"),
    ("a:b", A, 0, "kid"),
    ("k" * 65, A, 0, "kid"),
    ("\ud800", A, 0, "kid"),
    (None, A, 0, "kid"),
    ("k", "shortsecret", 0, "secret_hex"),
    ("k", "zz" * 32, 0, "secret_hex"),
    ("k", "", 0, "secret_hex"),
    ("k", b"ab" * 32, 0, "secret_hex"),
    ("k", A, -1, "grace_ms"),
    ("k", A, 1.5, "grace_ms"),
    ("k", A, True, "grace_ms"),
    ("k", A, 2**62, "grace_ms"),
    ("k", A, None, "grace_ms"),
]


async def test_bad_input_is_named_and_stores_nothing(rig: Rig) -> None:
    """C-116, V-012, V-015, V-019 (the HTTP part does not exist yet)."""
    for kid, secret, grace_ms, field in BAD:
        with pytest.raises(Validation) as refused:
            await rig.engine.rotate_waitpoint_hmac_secret_all(kid, secret, grace_ms)
        assert refused.value.kind == f"invalid_{field}"
        assert refused.value.field == (field if field == "grace_ms" else f"new_{field}")
        if field != "grace_ms":
            with pytest.raises(Validation) as refused:
                await rig.engine.seed_waitpoint_hmac_secret(kid, secret)
            assert (refused.value.kind, refused.value.field) == (f"invalid_{field}", field)
    assert await keys(rig) == []


async def test_the_database_admits_one_key_that_signs(rig: Rig) -> None:
    await rig.engine.seed_waitpoint_hmac_secret("a", A)
    with pytest.raises(Exception, match="ff_waitpoint_hmac_one_active"):
        await rig.sql.execute("insert into ff_waitpoint_hmac values ('b', '\\x00', 1, true)")


async def test_without_a_key_nothing_is_signed(rig: Rig) -> None:
    """C-130: an empty key store fails closed."""
    claim = await rig.running()
    before = await rig.fingerprint()
    calls: list[Any] = [
        rig.engine.suspend(claim.handle, Suspend([Fresh("a")], Count(1, CountKind.DISTINCT_SIGNALS, ("a",)))),
        rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=1000),
    ]
    for call in calls:
        with pytest.raises(EngineError) as refused:
            await call
        assert refused.value.code == "validation.invalid_input"
        assert "ffd keys seed" in str(refused.value)
    assert await rig.fingerprint() == before


async def test_a_name_past_its_grace_is_free_again(rig: Rig, clock: Clock) -> None:
    await rig.engine.seed_waitpoint_hmac_secret("a", "11" * 32)
    await rig.engine.rotate_waitpoint_hmac_secret_all("b", "22" * 32, 1000)
    await clock.advance(1001)
    assert await rig.engine.rotate_waitpoint_hmac_secret_all("a", "33" * 32, 1000) == Rotated("b", "a", 1)
    assert [key.kid for key in await rig.engine.list_waitpoint_keys() if key.is_active] == ["a"]
