"""Waitpoints made ahead, and listings that show everything but the token."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any
from uuid import uuid4

import pytest

from ffd import (
    AllOf,
    ByName,
    Claim,
    Engine,
    EngineError,
    Fresh,
    Handle,
    HandleKind,
    NotFound,
    OperatorOnly,
    Signal,
    Single,
    Suspend,
    Suspended,
    SuspendedExecution,
    TimeoutOnly,
    Validation,
    WaitpointInfo,
)
from ffd.core.conditions import Condition
from ffd.core.handles import read_lease
from ffd.core.tokens import fingerprint, verify_token
from tests.support import Clock, Rig, stale

pytestmark = pytest.mark.anyio

SECRET = "9c" * 32


@pytest.fixture(autouse=True)
async def _key(engine: Engine) -> None:
    await engine.seed_waitpoint_hmac_secret("k1", SECRET)


async def refused(rig: Rig, call: Awaitable[Any]) -> EngineError:
    rows = "select md5(coalesce(string_agg(t::text, '|' order by t::text), '')) from ff_waitpoint_pending t"
    before = await rig.fingerprint(), await rig.sql.fetchval(rows)
    with pytest.raises(EngineError) as info:
        await call
    assert (await rig.fingerprint(), await rig.sql.fetchval(rows)) == before, "a refused call changed something"
    return info.value


async def suspended(rig: Rig, condition: Condition, *keys: str, **suspend: Any) -> tuple[Claim, Suspended]:
    claim = await rig.running()
    outcome = await rig.engine.suspend(claim.handle, Suspend([Fresh(key) for key in keys], condition, **suspend))
    assert isinstance(outcome, Suspended)
    return claim, outcome


# create_waitpoint


async def test_a_waitpoint_made_ahead_is_pending_and_its_token_verifies(rig: Rig, clock: Clock) -> None:
    """C-127, C-128."""
    claim = await rig.running()
    pending = await rig.engine.create_waitpoint(claim.handle, "wpk:a", expires_in_ms=5000)
    row = await rig.sql.fetchrow("select * from ff_waitpoint_pending")
    assert row is not None
    now = await clock.now_ms()
    assert (str(row["waitpoint_id"]), row["waitpoint_key"], row["state"]) == (pending.waitpoint_id, "wpk:a", "pending")
    assert (row["created_at_ms"], row["expires_at_ms"], row["activated_at_ms"]) == (now, now + 5000, None)
    assert (row["token_kid"], row["token"]) == ("k1", pending.token)
    kid, mac = pending.token.split(":")
    assert (kid, len(mac), pending.key) == ("k1", 64, "wpk:a")
    where = (bytes.fromhex(SECRET), claim.execution_id, pending.waitpoint_id)
    assert verify_token(pending.token, *where)
    flipped = pending.token[:-1] + ("0" if mac[-1] != "0" else "1")
    assert not verify_token(flipped, *where)
    assert pending.token not in repr(pending)


async def test_each_call_makes_another_waitpoint(rig: Rig) -> None:
    """C-129: the key is no idempotency key."""
    claim = await rig.running()
    made = [await rig.engine.create_waitpoint(claim.handle, "same", expires_in_ms=5000) for _ in range(3)]
    assert len({point.waitpoint_id for point in made}) == len({point.token for point in made}) == 3


async def test_making_a_waitpoint_is_an_owners_call(rig: Rig, clock: Clock) -> None:
    """Stale fence, wrong state, expired, not found, malformed; the reference checks none of it."""
    claim = await rig.running()

    async def code(handle: Any) -> str:
        return (await refused(rig, rig.engine.create_waitpoint(handle, "a", expires_in_ms=5))).code

    assert await code(stale(claim, epoch=1)) == "contention.lease_conflict"
    assert await code(stale(claim, attempt=1)) == "contention.lease_conflict"
    gone = Handle.of_lease(HandleKind.FRESH, read_lease(claim.handle)._replace(execution_id=uuid4()))
    assert await code(gone) == "not_found"
    assert await code("handle") == "validation.corruption"
    await clock.advance(30_000)
    assert await code(claim.handle) == "state.lease_expired"
    done = await rig.running(lane="other")
    await rig.engine.complete(done.handle)
    assert await code(done.handle) == "contention.execution_not_active"


async def test_bad_input_is_named_and_makes_nothing(rig: Rig) -> None:
    claim = await rig.running()
    bad: list[tuple[Any, Any, str, str]] = [
        ("", 5, "key", "invalid_waitpoint_key"),
        ("k" * 257, 5, "key", "invalid_waitpoint_key"),
        ("__timeout__", 5, "key", "invalid_waitpoint_key"),
        ("a\0", 5, "key", "invalid_waitpoint_key"),
        (None, 5, "key", "invalid_waitpoint_key"),
        ("a", 0, "expires_in_ms", "invalid_input"),
        ("a", -1, "expires_in_ms", "invalid_input"),
        ("a", 2**62, "expires_in_ms", "invalid_input"),
        ("a", None, "expires_in_ms", "invalid_input"),
        ("a", True, "expires_in_ms", "invalid_input"),
    ]
    for key, expires_in_ms, field, kind in bad:
        error = await refused(rig, rig.engine.create_waitpoint(claim.handle, key, expires_in_ms=expires_in_ms))
        assert isinstance(error, Validation)
        assert (error.field, error.kind) == (field, kind), key


async def test_open_waitpoints_are_bounded(rig: Rig) -> None:
    """I10."""
    claim = await rig.running()
    for at in range(256):
        await rig.engine.create_waitpoint(claim.handle, str(at), expires_in_ms=60_000)
    error = await refused(rig, rig.engine.create_waitpoint(claim.handle, "one more", expires_in_ms=60_000))
    assert error.code == "conflict.waitpoint_already_exists"


# Tokens for operators


async def test_an_operator_can_read_the_token_of_an_open_waitpoint_again(rig: Rig) -> None:
    """C-126, V-020: None for what is not there, closed or another execution's."""
    claim, outcome = await suspended(rig, Single("a"), "a")
    (point,) = outcome.waitpoints
    read = rig.engine.read_waitpoint_token
    assert await read(claim.execution_id, point.waitpoint_id) == point.token
    assert await read(claim.execution_id, point.waitpoint_id.upper()) == point.token
    other = await rig.running()
    assert await read(claim.execution_id, str(uuid4())) is None
    assert await read(other.execution_id, point.waitpoint_id) is None
    assert await read(f"{{fp:0}}:{uuid4()}", point.waitpoint_id) is None
    pending = await rig.engine.create_waitpoint(other.handle, "a", expires_in_ms=5000)
    assert await read(other.execution_id, pending.waitpoint_id) == pending.token
    await rig.engine.deliver_signal(
        Signal(claim.execution_id, point.waitpoint_id, "x", point.token, source_type="t", source_identity="i")
    )
    assert await read(claim.execution_id, point.waitpoint_id) is None
    for execution_id, waitpoint_id, field in (
        ("x", point.waitpoint_id, "execution_id"),
        (claim.execution_id, "x", "waitpoint_id"),
    ):
        error = await refused(rig, read(execution_id, waitpoint_id))
        assert getattr(error, "field", None) == field


# list_pending_waitpoints


async def test_a_listing_shows_ten_fields_and_never_the_token(rig: Rig, clock: Clock) -> None:
    """C-002, C-007."""
    claim = await rig.running()
    await clock.advance(3)
    now = await clock.now_ms()
    outcome = await rig.engine.suspend(
        claim.handle, Suspend([Fresh("wpk:a")], Single("wpk:a", ByName("ready")), timeout_at_ms=now + 50)
    )
    (point,) = outcome.waitpoints
    page = await rig.engine.list_pending_waitpoints(claim.execution_id)
    assert page.next is None
    assert page.items == [
        WaitpointInfo(
            point.waitpoint_id,
            "wpk:a",
            "active",
            ["ready"],
            now,
            now,
            now + 50,
            claim.execution_id,
            "k1",
            fingerprint(point.token),
        )
    ]
    assert len(WaitpointInfo.__struct_fields__) == 10
    assert len(page.items[0].token_fingerprint) == 16
    assert point.token not in repr(page)
    assert point.token.partition(":")[2] not in repr(page)


@pytest.mark.parametrize(
    ("condition", "names"),
    [
        (Single("a"), {"a": [], "b": []}),
        (AllOf((Single("a", ByName("x")), Single("b", ByName("y")))), {"a": ["x"], "b": ["y"]}),
        (OperatorOnly(), {"a": ["__operator_only__"], "b": ["__operator_only__"]}),
        (TimeoutOnly(), {"a": ["__timeout_only__"], "b": ["__timeout_only__"]}),
    ],
    ids=["wildcard", "all_of", "operator_only", "timeout_only"],
)
async def test_the_names_a_waitpoint_waits_for_are_listed(
    rig: Rig, condition: Condition, names: dict[str, list[str]]
) -> None:
    """C-003, C-004, C-005."""
    claim, _ = await suspended(rig, condition, "a", "b", timeout_at_ms=2**50)
    page = await rig.engine.list_pending_waitpoints(claim.execution_id)
    assert {item.key: item.required_signal_names for item in page.items} == names


async def test_listing_pages_through_without_overlap(rig: Rig) -> None:
    """C-008."""
    claim, outcome = await suspended(rig, OperatorOnly(), "a", "b", "c")
    first = await rig.engine.list_pending_waitpoints(claim.execution_id, limit=2)
    assert len(first.items) == 2
    assert first.next == first.items[-1].waitpoint_id
    second = await rig.engine.list_pending_waitpoints(claim.execution_id, after=first.next, limit=2)
    assert second.next is None
    seen = [item.waitpoint_id for item in (*first.items, *second.items)]
    assert seen == sorted(point.waitpoint_id for point in outcome.waitpoints)
    assert (await rig.engine.list_pending_waitpoints(claim.execution_id, limit=3)).next is None
    assert (await rig.engine.list_pending_waitpoints(claim.execution_id, limit=0)).items == []


async def test_listing_an_unknown_execution_is_not_found_and_one_without_waitpoints_is_empty(rig: Rig) -> None:
    """C-006."""
    error = await refused(rig, rig.engine.list_pending_waitpoints(f"{{fp:1}}:{uuid4()}"))
    assert isinstance(error, NotFound)
    claim = await rig.running()
    assert (await rig.engine.list_pending_waitpoints(claim.execution_id)).items == []
    pending = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    (item,) = (await rig.engine.list_pending_waitpoints(claim.execution_id)).items
    assert (item.waitpoint_id, item.state, item.activated_at_ms) == (pending.waitpoint_id, "pending", None)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"execution_id": "x"}, "execution_id"),
        ({"after": "x"}, "after"),
        ({"limit": -1}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"limit": None}, "limit"),
    ]
    for change, field in bad:
        error = await refused(rig, rig.engine.list_pending_waitpoints(**{"execution_id": claim.execution_id, **change}))
        assert getattr(error, "field", None) == field


# list_suspended


async def test_suspended_executions_are_listed_by_lane_newest_first(rig: Rig, clock: Clock) -> None:
    """Only those that wait now: not the resumed, not the running."""
    now = await clock.now_ms()
    ids = []
    for at in range(4):
        claim = await rig.running(lane=f"lane {at % 2}")
        outcome = await rig.engine.suspend(
            claim.handle, Suspend([], OperatorOnly(), timeout_at_ms=now + 9, reason="manual_pause")
        )
        ids.append((claim.execution_id, outcome.suspension_id))
    await rig.running(lane="lane 0")
    await rig.engine.resume_execution(ids[0][0], reason="x")
    page = await rig.engine.list_suspended()
    assert page.items == [
        SuspendedExecution(execution_id, f"lane {at % 2}", suspension_id, now, now + 9, "manual_pause")
        for at, (execution_id, suspension_id) in reversed(list(enumerate(ids)))
        if at
    ]
    assert page.next is None
    assert [item.execution_id for item in (await rig.engine.list_suspended(lane="lane 1")).items] == [
        ids[3][0],
        ids[1][0],
    ]
    seen: list[str] = []
    after = None
    for _ in range(3):
        page = await rig.engine.list_suspended(after=after, limit=1)
        seen += [item.execution_id for item in page.items]
        after = page.next
    assert after is None
    assert seen == [ids[3][0], ids[2][0], ids[1][0]]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"lane": ""}, "lane"),
        ({"after": "x"}, "after"),
        ({"limit": 1001}, "limit"),
    ]
    for change, field in bad:
        error = await refused(rig, rig.engine.list_suspended(**change))
        assert getattr(error, "field", None) == field
