"""Signals that come twice, too late, too large, or at a bad moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec
import pytest

from ffd import (
    Accepted,
    Count,
    Duplicate,
    Engine,
    ExecutionPolicy,
    Fresh,
    NewExecution,
    NotFound,
    PublicState,
    Signal,
    Single,
    State,
    StateKind,
    Suspend,
    UsePending,
)
from ffd.core.ids import new_uuid
from ffd.core.tokens import mint_token
from tests.signalling import (
    APPENDED,
    BUFFERED,
    MANY,
    SATISFIED,
    SECRET,
    SIGNALS,
    member_map,
    refused,
    rejections,
    send,
    signal,
    waiting,
)
from tests.support import WORKER, Clock, Rig, until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
async def _key(engine: Engine) -> None:
    await engine.seed_waitpoint_hmac_secret("k1", SECRET)


# Repeats


async def test_a_repeated_key_is_a_duplicate_for_24_hours(rig: Rig, clock: Clock) -> None:
    """V-016."""
    claim, outcome = await waiting(rig)
    one = signal(claim, outcome.waitpoints[0])
    first = await rig.engine.deliver_signal(one, idempotency_key="hook-1")
    assert isinstance(first, Accepted)
    before = await rig.fingerprint()
    await clock.advance(86_399_999)
    await rig.sql.execute("update ff_test_clock set now_ms = now_ms - 86399999")
    assert await rig.engine.deliver_signal(one, idempotency_key="hook-1") == Duplicate(first.signal_id)
    assert await rig.fingerprint() == before
    await clock.advance(86_399_999)
    assert await rig.engine.deliver_signal(one, idempotency_key="hook-1") == Duplicate(first.signal_id)
    await clock.advance(1)
    again = await rig.engine.deliver_signal(one, idempotency_key="hook-1")
    assert isinstance(again, Accepted)
    assert again.signal_id != first.signal_id
    assert await rig.engine.deliver_signal(one, idempotency_key="hook-1") == Duplicate(again.signal_id)
    assert (await rig.core(claim.execution_id))["signal_count"] == 2


async def test_the_time_of_a_key_can_be_chosen(rig: Rig, clock: Clock) -> None:
    claim, outcome = await waiting(rig)
    one = signal(claim, outcome.waitpoints[0])
    await rig.engine.deliver_signal(one, idempotency_key="k", idempotency_ttl_ms=10)
    await clock.advance(10)
    assert isinstance(await rig.engine.deliver_signal(one, idempotency_key="k"), Accepted)


async def test_keys_are_scoped_to_their_waitpoint(rig: Rig) -> None:
    claim, outcome = await waiting(rig, Count(9, SIGNALS, ("a", "b")), "a", "b")
    for point in outcome.waitpoints:
        assert await send(rig, signal(claim, point), idempotency_key="same") == APPENDED


async def test_a_key_used_at_another_executions_waitpoint_of_the_same_id_swallows_nothing(rig: Rig) -> None:
    """I5: callers may choose waitpoint ids; a signal must never be taken for another execution's."""
    ids = [f"{{fp:7}}:{new_uuid()}" for _ in range(2)]
    waitpoint_id = str(new_uuid())
    for at, execution_id in enumerate(ids):
        await rig.create(execution_id=execution_id, lane=f"lane {at}")
        claim = await rig.claim(f"lane {at}")
        outcome = await rig.engine.suspend(claim.handle, Suspend([Fresh("a", waitpoint_id)], Single("a")))
        effect = await send(rig, signal(claim, outcome.waitpoints[0]), idempotency_key="same")
        assert effect == SATISFIED
        repeat = await rig.engine.deliver_signal(signal(claim, outcome.waitpoints[0]), idempotency_key="same")
        assert isinstance(repeat, Duplicate)


async def test_a_repeated_signal_id_is_a_duplicate_wherever_the_first_one_is(rig: Rig) -> None:
    """V-028, V-030: stored, buffered, moved by the suspension, or seen by the resumed worker."""
    claim = await rig.running()
    pending = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    one = signal(claim, pending, signal_id=str(uuid4()))
    two = signal(claim, pending, signal_id=str(uuid4()))
    duplicate = Duplicate(str(one.signal_id))
    assert await send(rig, one) == BUFFERED
    assert await rig.engine.deliver_signal(one) == duplicate
    await rig.engine.suspend(claim.handle, Suspend([UsePending(pending.waitpoint_id)], Count(2, SIGNALS, ("a",))))
    assert await rig.engine.deliver_signal(one) == duplicate
    assert await send(rig, two) == SATISFIED
    for is_claimed in (False, True):
        if is_claimed:
            await rig.claim()
        assert await rig.engine.deliver_signal(one) == duplicate
        assert await rig.engine.deliver_signal(two) == Duplicate(str(two.signal_id))
    assert (await rig.core(claim.execution_id))["signal_count"] == 2


async def test_a_repeat_is_answered_even_after_the_end(rig: Rig) -> None:
    """Whoever lost the answer may ask again; the ids are accepted in either case of their letters."""
    claim, outcome = await waiting(rig, Single("a"))
    one = signal(claim, outcome.waitpoints[0], signal_id=str(uuid4()).upper())
    assert await rig.engine.deliver_signal(one, idempotency_key="k") == Accepted(str(one.signal_id).lower(), SATISFIED)
    await rig.engine.complete((await rig.claim()).handle)
    before = await rig.fingerprint()
    assert await rig.engine.deliver_signal(one, idempotency_key="k") == Duplicate(str(one.signal_id).lower())
    assert await rig.engine.deliver_signal(one) == Duplicate(str(one.signal_id).lower())
    assert await rig.fingerprint() == before


# Too late


async def test_a_late_signal_with_a_good_token_is_told_what_has_become_of_its_target(rig: Rig) -> None:
    """Contract §2.3: closed, ended, gone. The token proves itself: no waitpoint row is left by then."""
    claim, outcome = await waiting(rig, Single("a"), "a", "b")
    a, b = outcome.waitpoints
    await send(rig, signal(claim, a))
    assert await rig.sql.fetchval("select count(*) from ff_waitpoint_pending") == 0
    for point in (a, b):
        late = await rig.refused(rig.engine.deliver_signal(signal(claim, point)))
        assert (type(late), late.code) == (State, "state.waitpoint_closed")
    resumed = await rig.claim()
    assert (await rig.refused(rig.engine.deliver_signal(signal(claim, b)))).kind == StateKind.WAITPOINT_CLOSED
    await rig.engine.complete(resumed.handle)
    for point in (a, b):
        late = await rig.refused(rig.engine.deliver_signal(signal(claim, point)))
        assert (type(late), late.code) == (State, "state.target_not_signalable")
        assert not late.is_retryable
    await rig.sql.execute("delete from ff_exec_core")
    for point in (a, b):
        late = await rig.refused(rig.engine.deliver_signal(signal(claim, point)))
        assert isinstance(late, NotFound)
        assert (late.entity, late.id) == ("execution", claim.execution_id)


async def test_every_ending_refuses_signals(rig: Rig) -> None:
    """V-035…V-037: the ways out that do not exist yet are made with SQL; a waitpoint left over changes nothing."""
    for state in ("failed", "expired", "skipped", "cancelled"):
        claim, outcome = await waiting(rig)
        phase, attempt = ("cancelled", "cancelled") if state == "cancelled" else ("terminal", "attempt_terminal")
        await rig.sql.execute(
            "update ff_exec_core set public_state = $1, lifecycle_phase = $2, attempt_state = $3,"
            " ownership_state = 'unowned', blocking_reason = null where public_state = 'suspended'",
            state,
            phase,
            attempt,
        )
        late = await rig.refused(rig.engine.deliver_signal(signal(claim, outcome.waitpoints[0])))
        assert late.code == "state.target_not_signalable"


async def test_a_suspension_that_was_closed_takes_no_signal_even_if_its_waitpoint_is_left(rig: Rig) -> None:
    claim, outcome = await waiting(rig)
    await rig.sql.execute("update ff_suspension_current set closed_at_ms = 1")
    late = await rig.refused(rig.engine.deliver_signal(signal(claim, outcome.waitpoints[0])))
    assert late.code == "state.waitpoint_closed"
    await rig.sql.execute("delete from ff_suspension_current")
    late = await rig.refused(rig.engine.deliver_signal(signal(claim, outcome.waitpoints[0])))
    assert late.code == "state.waitpoint_closed"


async def test_a_good_token_for_a_waitpoint_that_never_was_finds_it_closed(rig: Rig) -> None:
    """Nobody but the holder of the secret can make one."""
    claim, _ = await waiting(rig)
    point = str(uuid4())
    token = mint_token("k1", bytes.fromhex(SECRET), claim.execution_id, point)
    one = Signal(claim.execution_id, point, "x", token, source_type="t", source_identity="")
    assert (await rig.refused(rig.engine.deliver_signal(one))).code == "state.waitpoint_closed"


# Bounds


async def test_the_policy_bounds_the_signals_of_an_execution_over_its_whole_life(rig: Rig) -> None:
    claim, outcome = await waiting(rig, Count(2, SIGNALS, ("a",)), policy=ExecutionPolicy(max_signals=3))
    for _ in range(2):
        await send(rig, signal(claim, outcome.waitpoints[0]))
    again = await rig.claim()
    second = await rig.engine.suspend(again.handle, Suspend([Fresh("a")], MANY))
    one = signal(claim, second.waitpoints[0], signal_id=str(uuid4()))
    await send(rig, one)
    error = await rig.refused(rig.engine.deliver_signal(signal(claim, second.waitpoints[0])))
    assert error.code == "validation.signal_limit_exceeded"
    assert isinstance(await rig.engine.deliver_signal(one), Duplicate), "a repeat is no further signal"


async def test_the_limit_holds_for_buffered_signals_too(rig: Rig) -> None:
    claim = await rig.running(policy=ExecutionPolicy(max_signals=1))
    pending = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    await send(rig, signal(claim, pending))
    error = await rig.refused(rig.engine.deliver_signal(signal(claim, pending)))
    assert error.code == "validation.signal_limit_exceeded"


async def test_a_payload_of_64_kib_is_taken_and_one_byte_more_is_not(rig: Rig) -> None:
    claim, outcome = await waiting(rig)
    (point,) = outcome.waitpoints
    await send(rig, signal(claim, point, payload=b"x" * 65_536))
    error = await rig.refused(rig.engine.deliver_signal(signal(claim, point, payload=b"x" * 65_537)))
    assert (error.code, getattr(error, "field", "")) == ("validation.payload_too_large", "payload")
    (seen,) = await rig.engine.observe_signals(outcome.handle)
    assert seen.payload == b"x" * 65_536


async def test_one_suspension_stores_at_most_a_mebibyte_of_signals(rig: Rig) -> None:
    """Hex doubles the payload: seven of 64 KiB fit, the eighth does not, a small one still does."""
    claim, outcome = await waiting(rig)
    (point,) = outcome.waitpoints
    for _ in range(7):
        await send(rig, signal(claim, point, payload=b"x" * 65_536))
    error = await rig.refused(rig.engine.deliver_signal(signal(claim, point, payload=b"x" * 65_536)))
    assert error.code == "validation.signal_limit_exceeded"
    await send(rig, signal(claim, point))


async def test_buffers_that_one_suspension_could_use_are_bounded_together(rig: Rig) -> None:
    claim = await rig.running()
    points = [await rig.engine.create_waitpoint(claim.handle, key, expires_in_ms=60_000) for key in "abcdefgh"]
    for point in points[:7]:
        assert await send(rig, signal(claim, point, payload=b"x" * 65_536)) == BUFFERED
    error = await rig.refused(rig.engine.deliver_signal(signal(claim, points[7], payload=b"x" * 65_536)))
    assert error.code == "validation.signal_limit_exceeded"
    await rig.engine.suspend(
        claim.handle, Suspend([UsePending(point.waitpoint_id) for point in points], Count(99, SIGNALS, ("a",)))
    )
    assert await rig.sql.fetchval("select octet_length(member_map::text) from ff_suspension_current") <= 1024 * 1024


BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "execution_id": ({"execution_id": "nope"}, "execution_id"),
    "partition": ({"execution_id": f"{{fp:256}}:{uuid4()}"}, "execution_id"),
    "waitpoint_id": ({"waitpoint_id": "nope"}, "waitpoint_id"),
    "no waitpoint_id": ({"waitpoint_id": None}, "waitpoint_id"),
    "empty name": ({"name": ""}, "name"),
    "long name": ({"name": "n" * 257}, "name"),
    "NUL in the name": ({"name": "a\0"}, "name"),
    "surrogate": ({"name": "\ud800"}, "name"),
    "no source type": ({"source_type": ""}, "source_type"),
    "source identity": ({"source_identity": None}, "source_identity"),
    "category": ({"category": ""}, "category"),
    "payload": ({"payload": "text"}, "payload"),
    "correlation_id": ({"correlation_id": 5}, "correlation_id"),
    "signal_id": ({"signal_id": "s-1"}, "signal_id"),
}


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"idempotency_key": ""}, "idempotency_key"),
    ({"idempotency_key": "k" * 257}, "idempotency_key"),
    ({"idempotency_key": "a\0"}, "idempotency_key"),
    ({"idempotency_key": 5}, "idempotency_key"),
    ({"idempotency_key": "k", "idempotency_ttl_ms": 0}, "idempotency_ttl_ms"),
    ({"idempotency_key": "k", "idempotency_ttl_ms": 2**62}, "idempotency_ttl_ms"),
    ({"idempotency_key": "k", "idempotency_ttl_ms": None}, "idempotency_ttl_ms"),
]


async def test_bad_input_is_named_and_changes_nothing(rig: Rig) -> None:
    claim, outcome = await waiting(rig)
    good = signal(claim, outcome.waitpoints[0])
    count = rejections()
    for name, (change, field) in BAD_FIELDS.items():
        error = await rig.refused(rig.engine.deliver_signal(msgspec.structs.replace(good, **change)))
        assert (error.code, getattr(error, "field", None)) == ("validation.invalid_input", field), name
    for options, field in BAD_OPTIONS:
        error = await rig.refused(rig.engine.deliver_signal(good, **options))
        assert (error.code, getattr(error, "field", None)) == ("validation.invalid_input", field), options
    assert rejections() == count
    assert await send(rig, good) == APPENDED


async def test_what_is_no_signal_is_refused(rig: Rig) -> None:
    for one in (None, "signal", {"name": "x"}):
        error = await refused(rig.engine.deliver_signal(one))  # type: ignore[arg-type]
        assert getattr(error, "field", None) == "signal"


# Contention


async def test_a_signal_waits_for_the_row_and_is_then_delivered(rig: Rig, dsn: str) -> None:
    """C-124: with the row lock a contended signal is answered, not sent away."""
    claim, outcome = await waiting(rig, Single("a"))
    blocker = await asyncpg.connect(dsn)
    await blocker.execute("begin")
    await blocker.execute("select 1 from ff_exec_core for update")
    await blocker.execute("update ff_suspension_current set member_map = '{\"holder\": []}'")
    call = asyncio.create_task(send(rig, signal(claim, outcome.waitpoints[0])))
    await until(
        lambda: rig.sql.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
    )
    await blocker.execute("commit")
    await blocker.close()
    assert await call == SATISFIED
    assert (await member_map(rig, claim)).keys() == {"holder", "a"}, "what was committed meanwhile is seen"


@pytest.fixture
async def impatient(open_engine: Callable[..., Any]) -> AsyncIterator[Engine]:
    """An engine that waits for no lock for long."""
    async with open_engine(lock_timeout_ms=100, pool_max=2) as engine:
        yield engine


async def test_a_row_that_is_never_free_is_reported_after_three_tries(rig: Rig, impatient: Engine, dsn: str) -> None:
    """C-124: `RETRY_EXHAUSTED` when the lock is not granted in time; nothing is written, and it may be repeated."""
    claim, outcome = await waiting(rig, Single("a"))
    before = await rig.fingerprint()
    blocker = await asyncpg.connect(dsn)
    await blocker.execute("begin")
    await blocker.execute("select 1 from ff_exec_core for update")
    error = await refused(impatient.deliver_signal(signal(claim, outcome.waitpoints[0])))
    await blocker.close()
    assert (error.code, error.is_retryable) == ("contention.retry_exhausted", True)
    assert await rig.fingerprint() == before
    assert isinstance(await impatient.deliver_signal(signal(claim, outcome.waitpoints[0])), Accepted)


async def test_signals_leave_the_execution_public_state_alone_until_they_resume(rig: Rig) -> None:
    await rig.engine.create_executions([NewExecution(), NewExecution()])
    one, two = await rig.engine.claim_many("default", 2, **WORKER)
    outcome = await rig.engine.suspend(one.handle, Suspend([Fresh("a")], MANY))
    await send(rig, signal(one, outcome.waitpoints[0]))
    for claim, state in ((one, PublicState.SUSPENDED), (two, PublicState.RUNNING)):
        snapshot = await rig.engine.describe_execution(claim.execution_id)
        assert snapshot is not None
        assert snapshot.public_state == state


async def test_a_repeated_signal_id_is_a_duplicate_at_another_pending_waitpoint(rig: Rig) -> None:
    claim = await rig.running()
    first = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    second = await rig.engine.create_waitpoint(claim.handle, "b", expires_in_ms=60_000)
    same = str(uuid4())
    assert await send(rig, signal(claim, first, signal_id=same)) == BUFFERED
    assert await rig.engine.deliver_signal(signal(claim, second, signal_id=same)) == Duplicate(same)
    assert (await rig.core(claim.execution_id))["signal_count"] == 1
