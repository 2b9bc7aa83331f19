"""Operators against owners, signals and each other: one moves the execution, the rest are told so (I1, I2, I5)."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import anyio
import pytest

from ffd import (
    Accepted,
    AlreadySatisfied,
    Cancelled,
    Claim,
    Contention,
    ContentionKind,
    EngineError,
    FlowSpec,
    Fresh,
    HandleKind,
    LeaseRenewal,
    NewExecution,
    Replayed,
    Revoked,
    SatisfiedReason,
    Signal,
    SignalEffect,
    Single,
    State,
    StateKind,
    Suspend,
    Suspended,
    Validation,
    ValidationKind,
)
from ffd.core.ids import ExecutionKey, parse_execution_id
from ffd.ops.revoke import REVOKE_LEASE
from ffd.ops.take_over import CLAIM_STARTED
from tests.concurrency.sessions import INVARIANTS, Call, both_ways, exec_row, held, race, reclaim, until_blocked
from tests.support import OTHER, WORKER, Rig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

SOLO_AND_MEMBER = pytest.mark.parametrize("is_member", [False, True], ids=["solo", "member"])
REASON = "enough of this"

# Each query finds executions for which a rule of these races does not hold.
RULES = {
    "I5: whoever has ended waits for nothing": """
        select e.execution_id from ff_exec_core e
        where e.lifecycle_phase in ('terminal', 'cancelled') and (
          exists (select 1 from ff_waitpoint_pending w
                  where w.partition_key = e.partition_key and w.execution_id = e.execution_id)
          or exists (select 1 from ff_suspension_current s
                     where s.partition_key = e.partition_key and s.execution_id = e.execution_id
                       and (s.closed_at_ms is null or s.timeout_at_ms is not null)))
        """,
    "I6: an edge out of who has ended is resolved, and nothing is owed": """
        select g.upstream_eid as execution_id from ff_edge g
        join ff_exec_core u on u.partition_key = g.partition_key and u.execution_id = g.upstream_eid
        where g.resolution is null and u.lifecycle_phase in ('terminal', 'cancelled')
        union all select execution_id from ff_cascade_owed
        """,
    "I6: nobody is blocked by resolved edges": """
        select e.execution_id from ff_exec_core e
        where e.eligibility_state = 'blocked_by_dependencies' and not exists (
          select 1 from ff_edge g where g.partition_key = e.partition_key and g.flow_id = e.flow_id
            and g.downstream_eid = e.execution_id and g.resolution is null)
        """,
}


class Case(NamedTuple):
    """A claimed execution, and the child that waits for it if it is a member of a flow."""

    claim: Claim
    child: str | None

    @property
    def id(self) -> str:
        return self.claim.execution_id


# All of them in one look: a race has to leave the machine to its rounds.
LOOK = " union all ".join(
    f"select '{name}' as name, r.{column}::text as id from ({violations}) r"
    for rules, column in ((INVARIANTS, "execution_id"), (RULES, "execution_id"))
    for name, violations in rules.items()
)


async def check(rig: Rig) -> None:
    """What must hold over everything stored, after every round."""
    rows = await rig.sql.fetch(LOOK)
    assert not rows, [(row["name"], row["id"]) for row in rows[:5]]


async def begin(rig: Rig, *, is_member: bool) -> Case:
    if not is_member:
        return Case(await rig.running(), None)
    nodes = {"up": NewExecution(), "down": NewExecution(lane="down")}
    flow = await rig.engine.submit_flow(FlowSpec(nodes, [("up", "down")]))
    claim = await rig.claim()
    assert claim.execution_id == flow.execution_ids["up"]
    return Case(claim, flow.execution_ids["down"])


async def check_child(rig: Rig, case: Case, expected: str) -> None:
    """The child follows what became of its upstream, once."""
    if case.child is not None:
        assert (await rig.state(case.child))[0] == expected
        assert await rig.completions(case.child) == (["skipped"] if expected == "skipped" else [])


async def operator_events(rig: Rig, execution_id: str) -> list[str]:
    rows = await rig.sql.fetch(
        "select event_type from ff_operator_event where execution_id = $1 order by event_id",
        str(parse_execution_id(execution_id).execution_id),
    )
    return [row["event_type"] for row in rows]


async def at_the_row(rig: Rig, dsn: str, case: Case, rng: random.Random, statements: list[str], *calls: Call) -> Any:
    """Let the calls collide: now and then all of them wait at one row before the first goes on.

    A member's row is its flow's, where all that may end a member queue.
    """
    if rng.random() < 0.6:
        return await race(rng, *calls)
    row = exec_row(case.id)
    if case.child is not None:
        key: ExecutionKey = parse_execution_id(case.id)
        row = (
            f"select 1 from ff_flow_core f join ff_exec_core e using (partition_key, flow_id)"
            f" where e.partition_key = {key.partition_key} and e.execution_id = '{key.execution_id}' for update of f"
        )
    async with held(dsn, row) as holder:

        async def release() -> None:
            await until_blocked(rig.sql, *statements, count=len(calls))
            await holder.execute("rollback")

        return (await race(rng, *calls, release))[:-1]


@SOLO_AND_MEMBER
async def test_two_cancels_both_succeed_and_write_one_ending(
    rig: Rig, dsn: str, rng: random.Random, rounds: int, is_member: bool
) -> None:
    """Show C-082: one completion event, one `revoked` lease event, one operator event."""
    winners: Counter[str] = Counter()
    while both_ways(winners, rounds):
        case = await begin(rig, is_member=is_member)
        cancel = partial(rig.engine.cancel_execution, case.id)
        answers = await at_the_row(
            rig,
            dsn,
            case,
            rng,
            ["lock_flow", "lock_member"],
            partial(cancel, reason="first", actor="a"),
            partial(cancel, reason="second", actor="b"),
        )
        assert answers == [Cancelled(case.id, answers[0].public_state)] * 2
        assert await rig.completions(case.id) == ["cancelled"]
        assert await rig.lease_events(case.id) == [("acquired", None), ("revoked", "cancelled")]
        assert await operator_events(rig, case.id) == ["cancelled"]
        row = await rig.core(case.id)
        assert row["lease_epoch"] == case.claim.lease_epoch + 1
        winners[row["cancellation_reason"]] += 1
        with pytest.raises(Contention) as fenced:
            await rig.engine.complete(case.claim.handle)
        assert fenced.value.kind == ContentionKind.LEASE_CONFLICT
        await check_child(rig, case, "skipped")
        await check(rig)


@SOLO_AND_MEMBER
async def test_cancel_against_complete_has_exactly_one_outcome(
    rig: Rig, dsn: str, rng: random.Random, rounds: int, is_member: bool
) -> None:
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        case = await begin(rig, is_member=is_member)
        completed, cancelled = await at_the_row(
            rig,
            dsn,
            case,
            rng,
            ["lock_flow", "lock_member", "complete"],
            partial(rig.engine.complete, case.claim.handle, b"done"),
            partial(rig.engine.cancel_execution, case.id, reason=REASON),
        )
        if completed is None:
            endings["completed"] += 1
            assert isinstance(cancelled, Validation)
            assert cancelled.kind == ValidationKind.INVALID_INPUT
            assert await rig.completions(case.id) == ["success"]
            assert await rig.lease_events(case.id) == [("acquired", None), ("revoked", "completed")]
            assert await operator_events(rig, case.id) == []
            assert await rig.engine.get_execution_result(case.id) == b"done"
            await check_child(rig, case, "waiting")
        else:
            endings["cancelled"] += 1
            assert isinstance(completed, Contention)
            assert completed.kind == ContentionKind.LEASE_CONFLICT
            assert isinstance(cancelled, Cancelled)
            assert await rig.completions(case.id) == ["cancelled"]
            assert await rig.lease_events(case.id) == [("acquired", None), ("revoked", "cancelled")]
            assert await operator_events(rig, case.id) == ["cancelled"]
            assert await rig.engine.get_execution_result(case.id) is None
            await check_child(rig, case, "skipped")
        await check(rig)


async def test_cancel_against_claim_never_leaves_an_owner(rig: Rig, dsn: str, rng: random.Random, rounds: int) -> None:
    """I1: whoever claims first is fenced by the cancel; whoever comes after it finds nothing."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        execution_id = await rig.create()
        claim, cancelled = await race(
            rng,
            partial(rig.engine.claim, "default", **WORKER),
            partial(rig.engine.cancel_execution, execution_id, reason=REASON),
        )
        assert isinstance(cancelled, Cancelled)
        assert await rig.completions(execution_id) == ["cancelled"]
        assert await operator_events(rig, execution_id) == ["cancelled"]
        endings["nothing to claim" if claim is None else "fenced"] += 1
        events = [("acquired", None), ("revoked", "cancelled")]
        assert await rig.lease_events(execution_id) == ([] if claim is None else events)
        if claim is not None:
            for call in (rig.engine.renew, rig.engine.complete):
                with pytest.raises(Contention) as fenced:
                    await call(claim.handle)
                assert fenced.value.kind == ContentionKind.LEASE_CONFLICT
        await check(rig)


async def test_revoke_against_renew_leaves_no_lease_behind(rig: Rig, rng: random.Random, rounds: int) -> None:
    """I1: the renewal counts or is refused; the lease is gone either way, and no renewal comes after its end."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        claim = await rig.running()
        renewed, revoked = await race(
            rng,
            partial(rig.engine.renew, claim.handle),
            partial(rig.engine.revoke_lease, claim.execution_id, reason=REASON),
        )
        assert revoked == Revoked(claim.lease_id, claim.lease_epoch + 1)
        attempt = await rig.attempt(claim.execution_id)
        assert (attempt["lease_expires_at_ms"], attempt["lease_epoch"]) == (None, claim.lease_epoch + 1)
        events = [event for event, _ in await rig.lease_events(claim.execution_id)]
        if isinstance(renewed, LeaseRenewal):
            endings["renewed"] += 1
            assert events == ["acquired", "renewed", "revoked"]
        else:
            endings["refused"] += 1
            assert isinstance(renewed, Contention)
            assert renewed.kind == ContentionKind.LEASE_CONFLICT
            assert events == ["acquired", "revoked"]
        again = await reclaim(rig, claim)
        assert again.handle.kind == HandleKind.RECLAIMED
        await rig.engine.complete(again.handle)
        await check(rig)


@SOLO_AND_MEMBER
async def test_revoke_against_complete_has_exactly_one_outcome(
    rig: Rig, rng: random.Random, rounds: int, is_member: bool
) -> None:
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        case = await begin(rig, is_member=is_member)
        completed, revoked = await race(
            rng,
            partial(rig.engine.complete, case.claim.handle),
            partial(rig.engine.revoke_lease, case.id, reason=REASON),
        )
        if completed is None:
            endings["completed"] += 1
            assert isinstance(revoked, AlreadySatisfied)
            assert revoked.reason in (SatisfiedReason.NO_ACTIVE_LEASE, SatisfiedReason.EPOCH_MOVED)
            assert await operator_events(rig, case.id) == []
        else:
            endings["revoked"] += 1
            assert isinstance(completed, Contention)
            assert completed.kind == ContentionKind.LEASE_CONFLICT
            assert revoked == Revoked(case.claim.lease_id, case.claim.lease_epoch + 1)
            assert await operator_events(rig, case.id) == ["lease_revoked"]
            assert await rig.completions(case.id) == []
            await check_child(rig, case, "waiting_children")
            await rig.engine.complete((await reclaim(rig, case.claim)).handle)
        assert await rig.completions(case.id) == ["success"]
        await check_child(rig, case, "waiting")
        await check(rig)


async def test_two_revokes_take_one_lease_once(rig: Rig, dsn: str, rng: random.Random, rounds: int) -> None:
    """Show C-081 under concurrency: one `revoked` event, one operator event, the epoch rises once."""
    winners: Counter[int] = Counter()
    while both_ways(winners, rounds):
        claim = await rig.running()
        revoke = partial(rig.engine.revoke_lease, claim.execution_id, reason=REASON)
        answers = await at_the_row(rig, dsn, Case(claim, None), rng, ["revoke_lease"], revoke, revoke)
        (won,) = [at for at, answer in enumerate(answers) if isinstance(answer, Revoked)]
        winners[won] += 1
        assert answers[won] == Revoked(claim.lease_id, claim.lease_epoch + 1)
        lost = answers[1 - won]
        assert isinstance(lost, AlreadySatisfied)
        assert lost.reason in (SatisfiedReason.NO_ACTIVE_LEASE, SatisfiedReason.EPOCH_MOVED)
        assert await rig.lease_events(claim.execution_id) == [("acquired", None), ("revoked", "operator")]
        assert await operator_events(rig, claim.execution_id) == ["lease_revoked"]
        await rig.engine.complete((await reclaim(rig, claim)).handle)
        await check(rig)


async def test_a_revoke_never_takes_the_lease_of_the_next_owner(rig: Rig, rng: random.Random, rounds: int) -> None:
    """I1: two operators mean the lease that stood when they looked, while a worker takes the work over."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        claim = await rig.running()
        revoke = partial(rig.engine.revoke_lease, claim.execution_id, reason=REASON, expected_lease_id=claim.lease_id)
        *answers, taken = await race(rng, revoke, revoke, partial(rig.engine.claim, "default", **OTHER))
        assert sum(isinstance(answer, Revoked) for answer in answers) == 1
        assert await operator_events(rig, claim.execution_id) == ["lease_revoked"]
        endings["not yet" if taken is None else "taken over"] += 1
        if taken is None:
            taken = await reclaim(rig, claim)
        assert taken.lease_epoch == claim.lease_epoch + 2
        assert (await rig.engine.renew(taken.handle)).lease_epoch == taken.lease_epoch
        await rig.engine.complete(taken.handle)
        await check(rig)


async def test_a_revoke_that_waited_spares_the_lease_that_came_meanwhile(rig: Rig, dsn: str, rounds: int) -> None:
    """I1: it finds the same attempt running again when it gets the row; only the epoch tells the leases apart."""
    for _ in range(rounds // 4):
        claim = await rig.running()
        key = parse_execution_id(claim.execution_id)
        lease = (claim.attempt_index, claim.lease_epoch)
        owner = (WORKER["worker_id"], WORKER["worker_instance_id"], claim.lease_id)
        async with held(dsn, exec_row(claim.execution_id)) as holder, anyio.create_task_group() as tasks:
            answers: list[Any] = []

            async def revoke(execution_id: str = claim.execution_id, answers: list[Any] = answers) -> None:
                answers.append(await rig.engine.revoke_lease(execution_id, reason=REASON))

            tasks.start_soon(revoke)
            await until_blocked(rig.sql, "revoke_lease")
            # Somebody else's revoke and the claim after it, committed together.
            assert await holder.fetch(REVOKE_LEASE.sql, *key, *lease, REASON, "", *owner)
            assert await holder.fetch(CLAIM_STARTED.sql, *key, *OTHER.values(), 30_000)
            await holder.execute("commit")
        assert answers == [AlreadySatisfied(SatisfiedReason.EPOCH_MOVED)]
        row = await rig.attempt(claim.execution_id)
        assert (row["lease_epoch"], row["worker_id"]) == (claim.lease_epoch + 2, OTHER["worker_id"])
        assert row["lease_expires_at_ms"] is not None
        assert await operator_events(rig, claim.execution_id) == ["lease_revoked"]
        await check(rig)
        await rig.engine.cancel_execution(claim.execution_id, reason=REASON)


@pytest.mark.parametrize("ended", ["completed", "cancelled", "skipped"])
async def test_two_replays_start_an_execution_once(
    rig: Rig, dsn: str, rng: random.Random, rounds: int, ended: str
) -> None:
    """One wins, the other finds it under way; the epoch and the count rise once, one event tells of it."""
    winners: Counter[int] = Counter()
    while both_ways(winners, rounds):
        case = await begin(rig, is_member=ended == "skipped")
        if ended == "completed":
            await rig.engine.complete(case.claim.handle)
        else:
            await rig.engine.cancel_execution(case.id, reason=REASON)
        execution_id = case.child or case.id
        before = await rig.core(execution_id)
        assert before["public_state"] == ended
        replay = partial(rig.engine.replay_execution, execution_id, reason="again")
        answers = await at_the_row(rig, dsn, case, rng, ["lock_flow", "lock_member"], replay, replay)
        (won,) = [at for at, answer in enumerate(answers) if isinstance(answer, Replayed)]
        winners[won] += 1
        lost = answers[1 - won]
        assert isinstance(lost, State)
        assert lost.kind == StateKind.EXECUTION_NOT_TERMINAL
        row = await rig.core(execution_id)
        assert row["public_state"] == answers[won].public_state
        assert row["public_state"] == ("waiting_children" if case.child else "waiting")
        assert (row["replay_count"], row["lease_epoch"]) == (1, before["lease_epoch"] + 1)
        assert (await operator_events(rig, execution_id)).count("replayed") == 1
        assert len(await rig.completions(execution_id)) == 1
        # One ending per replay generation: the second life ends too, once.
        if case.child is None:
            again = await rig.claim()
            assert (again.execution_id, again.attempt_index) == (execution_id, case.claim.attempt_index)
            assert again.lease_epoch > row["lease_epoch"]
            await rig.engine.complete(again.handle)
        else:
            assert (await rig.engine.replay_execution(case.id)).public_state == "waiting"
            await rig.engine.complete((await rig.claim()).handle)
            assert (await rig.state(execution_id))[0] == "waiting"
            await rig.engine.complete((await rig.claim("down")).handle)
        assert len(await rig.completions(execution_id)) == 2


@SOLO_AND_MEMBER
async def test_replay_against_cancel_ends_in_one_of_two_orders(
    rig: Rig, dsn: str, rng: random.Random, rounds: int, is_member: bool
) -> None:
    """Cancelled and then replayed, or still cancelled because the replay came too early; never a mixture."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        case = await begin(rig, is_member=is_member)
        cancelled, replayed = await at_the_row(
            rig,
            dsn,
            case,
            rng,
            ["lock_flow", "lock_member"],
            partial(rig.engine.cancel_execution, case.id, reason=REASON),
            partial(rig.engine.replay_execution, case.id),
        )
        assert isinstance(cancelled, Cancelled)
        assert await rig.completions(case.id) == ["cancelled"]
        assert await rig.lease_events(case.id) == [("acquired", None), ("revoked", "cancelled")]
        state = (await rig.state(case.id))[0]
        if isinstance(replayed, Replayed):
            endings["replayed"] += 1
            assert state == "waiting"
            assert await operator_events(rig, case.id) == ["cancelled", "replayed"]
            again = await rig.claim()
            assert again.lease_epoch == case.claim.lease_epoch + 3, "the cancel, the replay and the claim raise it"
            await rig.engine.complete(again.handle)
        else:
            endings["too early"] += 1
            assert isinstance(replayed, State)
            assert replayed.kind == StateKind.EXECUTION_NOT_TERMINAL
            assert state == "cancelled"
            assert await operator_events(rig, case.id) == ["cancelled"]
        await check_child(rig, case, "skipped")


@SOLO_AND_MEMBER
async def test_a_signal_and_a_resume_against_cancel_leave_nothing_open(
    rig: Rig, dsn: str, rng: random.Random, rounds: int, is_member: bool
) -> None:
    """I2, I5: resumed once or not at all, then cancelled; every waitpoint and the suspension are closed."""
    await rig.engine.seed_waitpoint_hmac_secret("k1", "ab" * 32)
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds, ways=3):
        case = await begin(rig, is_member=is_member)
        outcome = await rig.engine.suspend(case.claim.handle, Suspend([Fresh("a"), Fresh("b")], Single("a")))
        assert isinstance(outcome, Suspended)
        at = next(point for point in outcome.waitpoints if point.key == "a")
        signal = Signal(case.id, at.waitpoint_id, "go", at.token, source_type="test", source_identity="s")
        delivered, resumed, cancelled = await race(
            rng,
            partial(rig.engine.deliver_signal, signal),
            partial(rig.engine.resume_execution, case.id, reason=REASON),
            partial(rig.engine.cancel_execution, case.id, reason=REASON),
        )
        assert isinstance(cancelled, Cancelled)
        assert (await rig.state(case.id))[0] == "cancelled"
        events = await operator_events(rig, case.id)
        if isinstance(delivered, Accepted):
            endings["signal"] += 1
            assert delivered.effect == SignalEffect.RESUME_CONDITION_SATISFIED
            assert isinstance(resumed, State)
            assert resumed.kind == StateKind.EXECUTION_NOT_SUSPENDED
            assert events == ["cancelled"]
        elif resumed is None:
            endings["resume"] += 1
            assert isinstance(delivered, State)
            assert delivered.kind in (StateKind.WAITPOINT_CLOSED, StateKind.TARGET_NOT_SIGNALABLE)
            assert events == ["resumed", "cancelled"]
        else:
            endings["cancel"] += 1
            assert isinstance(delivered, State)
            assert delivered.kind == StateKind.TARGET_NOT_SIGNALABLE
            assert isinstance(resumed, State)
            assert resumed.kind == StateKind.EXECUTION_NOT_SUSPENDED
            assert events == ["cancelled"]
        is_resumed = isinstance(delivered, Accepted) or resumed is None
        assert await rig.completions(case.id) == (["resumable"] if is_resumed else []) + ["cancelled"]
        assert await rig.lease_events(case.id) == [("acquired", None), ("revoked", "suspended")]
        assert await rig.engine.claim("default", **OTHER) is None
        await check_child(rig, case, "skipped")
        await check(rig)


@SOLO_AND_MEMBER
async def test_suspend_against_cancel_leaves_nothing_open(
    rig: Rig, dsn: str, rng: random.Random, rounds: int, is_member: bool
) -> None:
    """I5: waitpoints that a suspension opens while the cancel waits are closed too."""
    await rig.engine.seed_waitpoint_hmac_secret("k1", "ab" * 32)
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        case = await begin(rig, is_member=is_member)
        calls: list[Call] = [
            partial(rig.engine.suspend, case.claim.handle, Suspend([Fresh("a")], Single("a"))),
            partial(rig.engine.cancel_execution, case.id, reason=REASON),
        ]
        if is_member:
            outcome, cancelled = await race(rng, *calls)
        else:
            outcome, cancelled = await at_the_row(rig, dsn, case, rng, ["lock_execution", "lock_member"], *calls)
        assert isinstance(cancelled, Cancelled)
        assert (await rig.state(case.id))[0] == "cancelled"
        assert await rig.completions(case.id) == ["cancelled"]
        if isinstance(outcome, Suspended):
            endings["suspended"] += 1
            assert await rig.lease_events(case.id) == [("acquired", None), ("revoked", "suspended")]
        else:
            endings["fenced"] += 1
            assert isinstance(outcome, EngineError)
            assert outcome.kind in (ContentionKind.LEASE_CONFLICT, ContentionKind.EXECUTION_NOT_ACTIVE)
            assert await rig.lease_events(case.id) == [("acquired", None), ("revoked", "cancelled")]
        await check_child(rig, case, "skipped")
        await check(rig)
