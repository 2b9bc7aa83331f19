"""Signals under fire: none is lost, a condition resumes its execution exactly once (I5, X-021), one way out wins.

Signals against `cancel_execution` are in `test_control_races`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import asyncpg
import pytest

from ffd import (
    Accepted,
    ByName,
    Claim,
    Conflict,
    ConflictKind,
    Contention,
    ContentionKind,
    Count,
    CountKind,
    EngineError,
    Fresh,
    NewExecution,
    Noop,
    Rotated,
    Seeded,
    Signal,
    SignalEffect,
    Single,
    State,
    StateKind,
    Suspend,
    Suspended,
    SuspensionAlreadySatisfied,
    UsePending,
    Validation,
)
from ffd.core.ids import new_uuid, parse_execution_id
from ffd.reconcilers import execution_deadline, suspension_timeout
from ffd.reconcilers.report import Report
from tests.concurrency.sessions import (
    assert_invariants,
    both_ways,
    exec_row,
    held,
    is_fenced,
    lose_lease,
    race,
    until_blocked,
)
from tests.support import OTHER, WORKER, Clock, Rig

pytestmark = pytest.mark.anyio

SIGNALS = 64
NEEDED = 40
APPENDED = SignalEffect.APPENDED_TO_WAITPOINT
SATISFIED = SignalEffect.RESUME_CONDITION_SATISFIED
BUFFERED = SignalEffect.BUFFERED_FOR_PENDING_WAITPOINT


@pytest.fixture
async def crowd(open_engine: Callable[..., Any], sql: asyncpg.Connection[Any]) -> AsyncIterator[Rig]:
    """An engine with a connection for every signal, and a key to sign with."""
    async with open_engine(pool_max=SIGNALS) as engine:
        await engine.seed_waitpoint_hmac_secret("k1", "ab" * 32)
        yield Rig(engine, sql)


async def suspended(rig: Rig, suspend: Suspend) -> tuple[Claim, Suspended]:
    claim = await rig.running()
    outcome = await rig.engine.suspend(claim.handle, suspend)
    assert isinstance(outcome, Suspended)
    return claim, outcome


def signals(execution_id: str, tokens: Sequence[Any], count: int, name: str = "go") -> list[Signal]:
    """`count` signals from as many sources, spread over the waitpoints."""
    return [
        Signal(execution_id, at.waitpoint_id, name, at.token, source_type="test", source_identity=f"s{i}")
        for i, at in ((i, tokens[i % len(tokens)]) for i in range(count))
    ]


async def stored(rig: Rig, execution_id: str) -> dict[str, Any]:
    """Everything that tells what became of an execution's signals."""
    key = parse_execution_id(execution_id)
    events = await rig.sql.fetch(
        "select signal_id, effect from ff_signal_event where execution_id = $1 order by event_id", str(key.execution_id)
    )
    member_map, closed = await rig.sql.fetchrow(
        "select (select count(*) from jsonb_each(member_map) m, jsonb_array_elements(m.value)), close_reason"
        " from ff_suspension_current where partition_key = $1 and execution_id = $2",
        *key,
    ) or (0, None)
    return {
        "events": [row["signal_id"] for row in events],
        "effects": Counter(row["effect"] for row in events),
        "stored": member_map,
        "counted": (await rig.core(execution_id))["signal_count"],
        "closed": closed,
        "waitpoints": await rig.sql.fetchval(
            "select count(*) from ff_waitpoint_pending where partition_key = $1 and execution_id = $2", *key
        ),
    }


async def all_at_once(rig: Rig, dsn: str, execution_id: str, calls: Sequence[Any], rng: random.Random) -> list[Any]:
    """Let the calls collide: now and then all of them wait at the execution's row before the first goes on."""
    if rng.random() < 0.7:
        return await race(rng, *calls)
    async with held(dsn, exec_row(execution_id)) as holder:

        async def release() -> None:
            await until_blocked(rig.sql, "lock_execution", count=len(calls))
            await holder.execute("rollback")

        return (await race(rng, *calls, release))[:-1]


@pytest.mark.parametrize("waitpoints", [("one",), ("a", "b", "c", "d")], ids=["one_waitpoint", "four_waitpoints"])
@pytest.mark.timeout(900)
async def test_64_concurrent_signals_meet_a_count_of_40_exactly_once(
    crowd: Rig, dsn: str, rng: random.Random, rounds: int, waitpoints: tuple[str, ...]
) -> None:
    """I5, X-021, C-124: 39 appended, one resumes, 24 come too late, and none is sent away to try again."""
    condition = Count(NEEDED, CountKind.DISTINCT_SIGNALS, waitpoints)
    for _ in range(rounds):
        claim, outcome = await suspended(crowd, Suspend([Fresh(key) for key in waitpoints], condition))
        calls = [
            partial(crowd.engine.deliver_signal, signal)
            for signal in signals(claim.execution_id, outcome.waitpoints, SIGNALS)
        ]
        answers = await all_at_once(crowd, dsn, claim.execution_id, calls, rng)
        tally = Counter(answer.effect if isinstance(answer, Accepted) else answer.kind for answer in answers)
        assert tally == {APPENDED: NEEDED - 1, SATISFIED: 1, StateKind.WAITPOINT_CLOSED: SIGNALS - NEEDED}
        assert await crowd.completions(claim.execution_id) == ["resumable"]
        found = await stored(crowd, claim.execution_id)
        assert found["effects"] == {APPENDED: NEEDED - 1, SATISFIED: 1}
        assert (found["stored"], found["counted"]) == (NEEDED, NEEDED)
        assert (found["waitpoints"], found["closed"]) == (0, "resumed")
        resumed = await crowd.engine.claim_resumed_execution(claim.execution_id, **OTHER)
        seen = [signal.signal_id for signal in await crowd.engine.observe_signals(resumed.handle)]
        accepted = {answer.signal_id for answer in answers if isinstance(answer, Accepted)}
        assert seen == found["events"], "the order of arrival is the order of the events"
        assert set(seen) == accepted
        await crowd.engine.complete(resumed.handle)
    await assert_invariants(crowd.sql)


async def test_the_same_signal_sent_many_times_at_once_counts_once(
    crowd: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    """V-016, V-030 under concurrency: one accepted, every other a duplicate of it, by id and by key."""
    for at in range(rounds):
        claim, outcome = await suspended(
            crowd, Suspend([Fresh("a")], Count(2, CountKind.DISTINCT_SIGNALS, ("a",)), reason="waiting_for_callback")
        )
        (signal,) = signals(claim.execution_id, outcome.waitpoints, 1)
        calls: list[Any] = [partial(crowd.engine.deliver_signal, signal, idempotency_key="once")] * 8
        if at % 2:
            fixed = Signal(
                signal.execution_id,
                signal.waitpoint_id,
                signal.name,
                signal.token,
                source_type="test",
                source_identity="s",
                signal_id="01900000-0000-7000-8000-000000000001",
            )
            calls = [partial(crowd.engine.deliver_signal, fixed)] * 8
        answers = await all_at_once(crowd, dsn, claim.execution_id, calls, rng)
        assert Counter(type(answer).__name__ for answer in answers) == {"Accepted": 1, "Duplicate": 7}
        assert len({answer.signal_id for answer in answers}) == 1
        found = await stored(crowd, claim.execution_id)
        assert (found["stored"], found["counted"], len(found["events"])) == (1, 1, 1)


async def test_a_signal_against_resume_execution_resumes_once(
    crowd: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        claim, outcome = await suspended(crowd, Suspend([Fresh("a")], Single("a")))
        (signal,) = signals(claim.execution_id, outcome.waitpoints, 1)
        answer, resumed = await race(
            rng,
            partial(crowd.engine.deliver_signal, signal),
            partial(crowd.engine.resume_execution, claim.execution_id, reason="enough"),
        )
        found = await stored(crowd, claim.execution_id)
        if isinstance(answer, Accepted):
            endings["signal"] += 1
            assert answer.effect == SATISFIED
            assert isinstance(resumed, State)
            assert resumed.kind == StateKind.EXECUTION_NOT_SUSPENDED
            assert (found["closed"], found["counted"]) == ("resumed", 1)
        else:
            endings["operator"] += 1
            assert resumed is None
            assert isinstance(answer, State)
            assert answer.kind == StateKind.WAITPOINT_CLOSED
            assert (found["closed"], found["counted"]) == ("operator", 0)
        assert await crowd.completions(claim.execution_id) == ["resumable"]
        assert found["waitpoints"] == 0
        operators = await crowd.sql.fetchval(
            "select count(*) from ff_operator_event where execution_id = $1",
            str(parse_execution_id(claim.execution_id).execution_id),
        )
        assert operators == (0 if resumed else 1)
        await crowd.engine.complete((await crowd.claim(**OTHER)).handle)
    await assert_invariants(crowd.sql)


async def test_a_signal_against_the_timeout_has_exactly_one_outcome(
    crowd: Rig, clock: Clock, rng: random.Random, rounds: int
) -> None:
    """Resumed, or failed; never both, and the loser is told so."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        claim, outcome = await suspended(
            crowd, Suspend([Fresh("a")], Single("a"), timeout_at_ms=await clock.now_ms() + 1000)
        )
        await clock.advance(1000)
        (signal,) = signals(claim.execution_id, outcome.waitpoints, 1)
        partition = parse_execution_id(claim.execution_id).partition_key
        sweep = partial(suspension_timeout.tick, crowd.engine._runtime, partition, 100)
        answer, report = await race(rng, partial(crowd.engine.deliver_signal, signal), sweep)
        assert isinstance(report, Report), report
        found = await stored(crowd, claim.execution_id)
        assert found["waitpoints"] == 0
        if isinstance(answer, Accepted):
            endings["signal"] += 1
            assert (answer.effect, report.outcomes["failed"]) == (SATISFIED, 0)
            assert await crowd.completions(claim.execution_id) == ["resumable"]
            await crowd.engine.complete((await crowd.claim(**OTHER)).handle)
        else:
            endings["ended"] += 1
            assert isinstance(answer, State)
            assert (answer.kind, report.outcomes["failed"]) == (StateKind.TARGET_NOT_SIGNALABLE, 1)
            assert await crowd.completions(claim.execution_id) == ["failed"]
            assert (found["stored"], found["counted"]) == (0, 0)
            assert await crowd.engine.claim("default", **OTHER) is None
    await assert_invariants(crowd.sql)


async def test_a_signal_against_the_deadline_is_counted_or_refused(
    crowd: Rig, clock: Clock, rng: random.Random, rounds: int
) -> None:
    """The deadline ends it either way; a signal that came first is stored, one that came later is told so."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        await crowd.create(deadline_at_ms=await clock.now_ms() + 1000)
        claim = await crowd.claim()
        outcome = await crowd.engine.suspend(claim.handle, Suspend([Fresh("a")], Single("a")))
        assert isinstance(outcome, Suspended)
        await clock.advance(1000)
        (signal,) = signals(claim.execution_id, outcome.waitpoints, 1)
        partition = parse_execution_id(claim.execution_id).partition_key
        sweep = partial(execution_deadline.tick, crowd.engine._runtime, partition, 100)
        answer, report = await race(rng, partial(crowd.engine.deliver_signal, signal), sweep)
        assert isinstance(report, Report), report
        again = await execution_deadline.tick(crowd.engine._runtime, partition, 100)
        assert report.moved + again.moved == 1
        found = await stored(crowd, claim.execution_id)
        assert found["waitpoints"] == 0
        assert await crowd.public(claim.execution_id) == "expired"
        if isinstance(answer, Accepted):
            endings["signal"] += 1
            assert (found["stored"], found["counted"]) == (1, 1)
            assert await crowd.completions(claim.execution_id) == ["resumable", "expired"]
        else:
            endings["ended"] += 1
            assert isinstance(answer, State)
            assert answer.kind == StateKind.TARGET_NOT_SIGNALABLE
            assert (found["stored"], found["counted"]) == (0, 0)
            assert await crowd.completions(claim.execution_id) == ["expired"]
    await assert_invariants(crowd.sql)


async def test_signals_that_race_the_suspension_they_are_for_are_counted_exactly_once(
    crowd: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    """I5, V-017: buffered before, appended after; whichever way, both are there and the condition fires once."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds, ways=3):
        claim = await crowd.running()
        pending = await crowd.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
        one, two = signals(claim.execution_id, [pending], 2)
        suspend = Suspend([UsePending(pending.waitpoint_id)], Count(2, CountKind.DISTINCT_SOURCES, ("a",)))
        calls = [
            partial(crowd.engine.deliver_signal, one),
            partial(crowd.engine.deliver_signal, two),
            partial(crowd.engine.suspend, claim.handle, suspend),
        ]
        first, second, outcome = await all_at_once(crowd, dsn, claim.execution_id, calls, rng)
        assert isinstance(first, Accepted), first
        assert isinstance(second, Accepted), second
        effects = Counter([first.effect, second.effect])
        found = await stored(crowd, claim.execution_id)
        assert (found["stored"], found["counted"], found["effects"]) == (2, 2, effects)
        assert found["waitpoints"] == 0
        if isinstance(outcome, SuspensionAlreadySatisfied):
            endings["both before"] += 1
            assert effects == {BUFFERED: 2}
            assert await crowd.completions(claim.execution_id) == []
            handle = claim.handle
        else:
            assert isinstance(outcome, Suspended)
            endings["one before" if effects[BUFFERED] else "both after"] += 1
            assert effects[SATISFIED] == 1
            assert await crowd.completions(claim.execution_id) == ["resumable"]
            handle = (await crowd.claim(**OTHER)).handle
        seen = [signal.signal_id for signal in await crowd.engine.observe_signals(handle)]
        assert seen == found["events"]
        assert set(seen) == {first.signal_id, second.signal_id}
        await crowd.engine.complete(handle)
    await assert_invariants(crowd.sql)


async def test_suspends_with_one_key_suspend_once_and_answer_alike(
    crowd: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    """C-121 under concurrency: token and handle included."""
    for _ in range(rounds):
        claim = await crowd.running()
        suspend = Suspend([Fresh("a"), Fresh("b")], Single("a", ByName("go")))
        calls = [partial(crowd.engine.suspend, claim.handle, suspend, idempotency_key="step 1")] * 6
        first, *others = await all_at_once(crowd, dsn, claim.execution_id, calls, rng)
        assert isinstance(first, Suspended)
        assert others == [first] * 5
        assert (await crowd.lease_events(claim.execution_id))[1:] == [("revoked", "suspended")]
        assert (await crowd.attempt(claim.execution_id))["lease_epoch"] == claim.lease_epoch + 1
        assert (await stored(crowd, claim.execution_id))["waitpoints"] == 2
        (signal,) = signals(claim.execution_id, first.waitpoints[:1], 1)
        answer = await crowd.engine.deliver_signal(signal)
        assert isinstance(answer, Accepted)
        assert answer.effect == SATISFIED
        await crowd.engine.complete((await crowd.claim(**OTHER)).handle)
    await assert_invariants(crowd.sql)


async def test_one_waitpoint_id_chosen_by_two_executions_goes_to_one_of_them(
    crowd: Rig, rng: random.Random, rounds: int
) -> None:
    """No lock joins two executions: the other is refused, never left waiting at a waitpoint that is not its own."""
    for at in range(rounds):
        claims, lanes = [], (f"{at} one", f"{at} two")
        for lane in lanes:
            await crowd.create(execution_id=f"{{fp:7}}:{new_uuid()}", lane=lane)
            claims.append(await crowd.claim(lane))
        request = Suspend([Fresh("a", str(new_uuid()))], Single("a"))
        answers = await race(rng, *(partial(crowd.engine.suspend, claim.handle, request) for claim in claims))
        ((won, claim),) = [pair for pair in zip(answers, claims, strict=True) if isinstance(pair[0], Suspended)]
        (lost,) = [answer for answer in answers if isinstance(answer, Conflict)]
        assert lost.kind == ConflictKind.WAITPOINT_ALREADY_EXISTS
        (signal,) = signals(claim.execution_id, won.waitpoints, 1)
        assert isinstance(await crowd.engine.deliver_signal(signal), Accepted)
        (other,) = [one for one in claims if one is not claim]
        await crowd.engine.complete(other.handle)
    await assert_invariants(crowd.sql)


async def test_suspends_without_a_key_suspend_once_and_fence_the_others(
    crowd: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    for _ in range(rounds):
        claim = await crowd.running()
        calls = [partial(crowd.engine.suspend, claim.handle, Suspend([Fresh("a")], Single("a")))] * 4
        answers = await all_at_once(crowd, dsn, claim.execution_id, calls, rng)
        refused = [answer for answer in answers if isinstance(answer, Contention)]
        assert [answer.kind for answer in refused] == [ContentionKind.LEASE_CONFLICT] * 3
        assert (await stored(crowd, claim.execution_id))["waitpoints"] == 1


async def test_suspend_against_lease_expiry_and_complete_has_exactly_one_outcome(
    crowd: Rig, clock: Clock, rng: random.Random, rounds: int
) -> None:
    """I1, I2: the owner's two calls and the sweep collide; one moves the execution."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        claim = await crowd.running()
        is_swept = rng.random() < 0.5
        rival: Any = partial(crowd.engine.complete, claim.handle, b"r")
        if is_swept:
            rival = partial(lose_lease, crowd, clock)
        answer, other = await race(
            rng, partial(crowd.engine.suspend, claim.handle, Suspend([Fresh("a")], Single("a"))), rival
        )
        if is_swept:
            other = None if other + await crowd.expire() else other
        state = (await crowd.state(claim.execution_id))[0]
        if isinstance(answer, Suspended):
            endings["suspended"] += 1
            assert state == "suspended"
            assert other == 0 or isinstance(other, EngineError)
            await crowd.engine.resume_execution(claim.execution_id, reason="go on")
            await crowd.engine.complete((await crowd.claim(**OTHER)).handle)
        elif is_swept:
            endings["expired"] += 1
            assert is_fenced(answer), answer
            assert (state, other) == ("waiting", None)
            await crowd.engine.complete((await crowd.claim(**OTHER)).handle)
        else:
            endings["completed"] += 1
            assert isinstance(answer, Contention)
            assert answer.kind == ContentionKind.EXECUTION_NOT_ACTIVE
            assert (state, other) == ("completed", None)
    await assert_invariants(crowd.sql)


async def test_one_worker_gets_the_resumed_execution(crowd: Rig, rng: random.Random, rounds: int) -> None:
    """I1: plain claims and `claim_resumed_execution` compete; the epoch rises once."""
    for _ in range(rounds):
        claim, outcome = await suspended(crowd, Suspend([Fresh("a")], Single("a")))
        (signal,) = signals(claim.execution_id, outcome.waitpoints, 1)
        await crowd.engine.deliver_signal(signal)
        answers = await race(
            rng,
            *[partial(crowd.engine.claim, "default", **WORKER)] * 3,
            *[partial(crowd.engine.claim_resumed_execution, claim.execution_id, **OTHER)] * 3,
        )
        (won,) = [answer for answer in answers if isinstance(answer, Claim)]
        assert (won.attempt_index, won.lease_epoch) == (claim.attempt_index, claim.lease_epoch + 2)
        refused = [answer.kind for answer in answers if isinstance(answer, Contention)]
        assert set(refused) <= {ContentionKind.NOT_A_RESUMED_EXECUTION}
        await crowd.engine.complete(won.handle)
    await assert_invariants(crowd.sql)


async def test_signals_to_many_executions_do_not_disturb_each_other(crowd: Rig, rng: random.Random) -> None:
    """Every one of them is resumed once, by its own two signals."""
    await crowd.engine.create_executions([NewExecution() for _ in range(24)])
    claims = await crowd.engine.claim_many("default", 24, **WORKER)
    calls: list[Any] = []
    for claim in claims:
        outcome = await crowd.engine.suspend(
            claim.handle, Suspend([Fresh("a")], Count(2, CountKind.DISTINCT_SIGNALS, ("a",)))
        )
        for signal in signals(claim.execution_id, outcome.waitpoints, 2):
            calls.append(partial(crowd.engine.deliver_signal, signal))
    answers = await race(rng, *calls)
    assert Counter(answer.effect for answer in answers) == {APPENDED: 24, SATISFIED: 24}
    for claim in claims:
        assert await crowd.completions(claim.execution_id) == ["resumable"]


async def test_concurrent_seeds_and_rotations_leave_one_key_that_signs(
    open_engine: Callable[..., Any], sql: asyncpg.Connection[Any], rng: random.Random, rounds: int
) -> None:
    async with open_engine(pool_max=12) as engine:
        for at in range(rounds):
            await sql.execute("truncate ff_waitpoint_hmac")
            seeds = await race(
                rng, *(partial(engine.seed_waitpoint_hmac_secret, f"seed-{at}-{i}", f"{i:064x}") for i in range(6))
            )
            (seeded,) = [answer for answer in seeds if isinstance(answer, Seeded)]
            assert sum(isinstance(answer, Validation) for answer in seeds) == 5
            rotations = await race(
                rng,
                *(partial(engine.rotate_waitpoint_hmac_secret_all, f"r-{at}-{i}", f"{i:064x}", 1000) for i in range(6)),
                *[partial(engine.rotate_waitpoint_hmac_secret_all, f"r-{at}-0", f"{0:064x}", 1000)] * 2,
            )
            assert Counter(type(answer) for answer in rotations) == {Rotated: 6, Noop: 2}
            keys = await engine.list_waitpoint_keys()
            assert [key.is_active for key in keys] == [True] + [False] * 6
            rotated = [answer for answer in rotations if isinstance(answer, Rotated)]
            assert {answer.previous_kid for answer in rotated} == {seeded.kid} | {r.new_kid for r in rotated} - {
                keys[0].kid
            }, "each key was replaced by exactly one other"
