"""What the end of a member means for its flow, in the transaction of the ending (I2, I3, I6).

Level by level: resolve the edges out of what ended; let the groups of their children decide; release or skip the
children, cancel who lost a race; what was skipped or cancelled is the next level. The transaction holds the flow row
from an earlier statement, so edges and groups stand still. Each edge is resolved once, which is what makes a group
count once and fire once, however often an ending is heard of.

One call moves a bounded number of rows. What is left over, and losers whose rows somebody holds, is written to
ff_cascade_owed in the same transaction and settled later, by the same code (`settle_owed`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final
from uuid import UUID

from ffd.core.events import Channel, work_ring
from ffd.core.limits import CASCADE_MAX
from ffd.db.database import Row
from ffd.db.pool import Connection
from ffd.db.statement import Planning, Statement
from ffd.ops.cancel_set import cancel_free
from ffd.ops.flow_lock import FlowKey, LockFlow, is_sealed, lock_flow
from ffd.ops.runtime import Runtime
from ffd.telemetry.metrics import CASCADE_EXECUTIONS, CASCADE_OWED

# $1 partition_key, $2 flow_id, $3 executions that ended, $4 how many edges at most. An edge that is not applied is
# resolved too, but counts in no group before it is. Upstreams replayed since look at their newest ending.
RESOLVE_EDGES: Final = Statement(
    "resolve_edges",
    """
    with k as materialized (select $1::smallint as p, $2::uuid as f, k.id from unnest($3::uuid[]) k(id)),
    u as materialized (
      select k.p, k.f, k.id, x.replay_count,
             ff_public_state(x.lifecycle_phase, x.eligibility_state, x.public_state, x.outcome) as state
      from k cross join lateral (
        select e.lifecycle_phase, e.eligibility_state, e.public_state, e.replay_count, (
                 select t.outcome from ff_attempt t where t.partition_key = e.partition_key
                 and t.execution_id = e.execution_id and t.attempt_index = e.attempt_index) as outcome
        from ff_exec_core e
        where e.partition_key = k.p and e.execution_id = k.id
          and e.lifecycle_phase in ('terminal', 'cancelled')) x),
    o as materialized (
      select u.p, u.f, u.id, g.edge_id, u.state, g.is_applied from u cross join lateral (
        select edge_id, policy ->> 'edge_state' = 'applied' as is_applied from ff_edge
        where upstream_eid = u.id and [[of its flow u]] and coalesce(resolution, '') = ''
          and upstream_replay <= u.replay_count
        offset 0) g
      limit $4),
    e as (
      update ff_edge t set resolution = case o.state when 'completed' then 'satisfied' else 'impossible' end
      from o where t.upstream_eid = o.id and t.edge_id = o.edge_id and [[of its flow o]]
      returning t.partition_key, t.flow_id, t.downstream_eid, o.state, o.is_applied),
    n as (
      select partition_key, flow_id, downstream_eid, count(*) as edges,
             count(*) filter (where is_applied) as counted,
             count(*) filter (where is_applied and state = 'completed') as satisfied,
             count(*) filter (where is_applied and state = 'skipped') as skipped
      from e group by partition_key, flow_id, downstream_eid),
    c as (
      update ff_edge_group g
      set success_count = g.success_count + n.satisfied, skip_count = g.skip_count + n.skipped,
          fail_count = g.fail_count + n.counted - n.satisfied - n.skipped,
          running_count = greatest(0, g.running_count - n.counted)
      from n where g.partition_key = n.partition_key and g.flow_id = n.flow_id
        and g.downstream_eid = n.downstream_eid)
    select downstream_eid, edges from n
    """,
    Planning.CUSTOM,
)

# $1 partition_key, $2 flow_id, $3 children in lock order, $4 whether the flow is sealed. A child that was claimed
# before waits for all its edges, whatever their outcomes; one that never was follows its group's policy. `need` is how
# many successes the group asks for (NULL: all); open edges are counted no further than that matters.
DECIDE_CHILDREN: Final = Statement(
    "decide_children",
    """
    with l as materialized (
      select $1::smallint as p, $2::uuid as f, e.* from unnest($3::uuid[]) k(id) cross join lateral (
        select execution_id, attempt_state, attempt_index, delay_until_ms, started_at_ms from ff_exec_core
        where partition_key = $1 and execution_id = k.id and flow_id = $2
          and lifecycle_phase in ('runnable', 'submitted') and eligibility_state = 'blocked_by_dependencies'
        for no key update) e),
    g as materialized (
      select l.*, ff_now_ms() as now, l.attempt_state = 'attempt_interrupted' as was_claimed, q.need, q.satisfied,
             q.bad, q.on_satisfied, o.open
      from l
      cross join lateral (
        select case coalesce(min(policy ->> 'kind'), 'all_of')
                 when 'any_of' then 1
                 when 'quorum' then min(ff_policy_number(policy, '{k}', 1)::int) end as need,
               coalesce(min(success_count), 0) as satisfied, coalesce(min(fail_count + skip_count), 0) as bad,
               coalesce(min(policy ->> 'on_satisfied'), 'cancel_remaining') as on_satisfied
        from ff_edge_group where partition_key = l.p and flow_id = l.f and downstream_eid = l.execution_id) q
      cross join lateral (
        select count(*) as open from (
          select 1 from ff_edge
          where downstream_eid = l.execution_id and [[of its flow l]] and resolution is null
            and (policy ->> 'edge_state' = 'applied' or l.attempt_state = 'attempt_interrupted')
          limit coalesce(q.need, 1)) z) o),
    d as materialized (
      select g.*, case
          when was_claimed then case open when 0 then 'ready' end
          when need is null and bad > 0 then 'skipped'
          when need is null and open = 0 then 'ready'
          when satisfied >= need then 'ready'
          when bad > 0 and satisfied + open < need then 'skipped'
          when open = 0 and need is not null and $4::boolean then 'skipped'
        end as verdict
      from g),
    r as materialized (
      select d.*, case
          when verdict = 'skipped' then 'skipped'
          when was_claimed then 'waiting_interrupted'
          when attempt_state = 'pending_replay_attempt' then 'waiting_replay'
          when delay_until_ms > now then 'delayed_first'
          else 'waiting_first' end as next_row
      from d where verdict is not null),
    x as (
      update ff_exec_core e
      set [[by r.next_row: waiting_first, waiting_replay, waiting_interrupted, delayed_first, skipped]],
          state_since_ms = r.now, terminal_at_ms = case r.next_row when 'skipped' then r.now end,
          delay_until_ms = case r.next_row when 'delayed_first' then r.delay_until_ms end
      from r where e.partition_key = r.p and e.execution_id = r.execution_id
      returning e.partition_key, e.execution_id, e.flow_id, e.lane_id, e.raw_fields, e.attempt_index, r.next_row, r.now,
                r.need is not null and not r.was_claimed and r.on_satisfied = 'cancel_remaining' as cancels),
    a as (
      update ff_attempt t set outcome = 'skipped', terminal_at_ms = x.now
      from x where x.next_row = 'skipped' and t.partition_key = x.partition_key and t.execution_id = x.execution_id
        and t.attempt_index = x.attempt_index),
    c as ([[into completion_event]]
      select x.partition_key, x.execution_id, x.flow_id, 'skipped', x.now, x.now, [[origin x]]
      from x where x.next_row = 'skipped')
    select execution_id, lane_id, next_row, cancels from x
    """,
    Planning.CUSTOM,
)

# $3 children whose groups have just decided. Upstreams with an open edge into them are still under way. The offset
# keeps the planner from turning the join around and walking every open edge there is.
LOSERS: Final = Statement(
    "losers",
    """
    with k as materialized (select $1::smallint as p, $2::uuid as f, k.id from unnest($3::uuid[]) k(id))
    select g.upstream_eid, k.id as child from k cross join lateral (
      select upstream_eid from ff_edge
      where downstream_eid = k.id and [[of its flow k]] and resolution is null
        and policy ->> 'edge_state' = 'applied'
      offset 0) g
    """,
    Planning.CUSTOM,
)

# $3 executions, $4 work, $5 reasons
OWE: Final = Statement(
    "owe",
    """
    [[into cascade_owed]]
    select $1, $2, k.id, $4, k.reason, ff_now_ms() from unnest($3::uuid[], $5::text[]) k(id, reason)
    on conflict (partition_key, flow_id, execution_id, work) do nothing
    """,
    Planning.CUSTOM,
)

# A sealed flow whose members have all ended, ends. It failed if any member that nothing depends on did not complete:
# what its policies could bear without, they have.
END_FLOW: Final = Statement(
    "end_flow",
    """
    with f as (
      update ff_flow_core t
      set public_flow_state = case when exists (
            select 1 from ff_exec_core m
            where m.partition_key = $1 and m.flow_id = $2
              and ff_public_state(m.lifecycle_phase, m.eligibility_state, m.public_state, (
                    select a.outcome from ff_attempt a where a.partition_key = m.partition_key
                    and a.execution_id = m.execution_id and a.attempt_index = m.attempt_index)) <> 'completed'
              and not exists (
                select 1 from ff_edge g
                where (g.partition_key = $1 and g.flow_id = $2) is true and g.upstream_eid = m.execution_id))
            then 'failed' else 'completed' end,
          terminal_at_ms = ff_now_ms()
      where t.partition_key = $1 and t.flow_id = $2 and t.sealed_at_ms is not null and t.terminal_at_ms is null
        and t.public_flow_state not in ('completed', 'failed', 'cancelled')
        and not exists (
          select 1 from ff_exec_core m
          where m.partition_key = $1 and m.flow_id = $2 and m.flow_id is not null
            and m.lifecycle_phase not in ('terminal', 'cancelled'))
      returning t.partition_key, t.flow_id, t.public_flow_state, t.terminal_at_ms, t.raw_fields),
    o as ([[into operator_event]]
      select f.partition_key, f.flow_id::text, 'flow_ended',
             jsonb_build_object('flow_id', f.flow_id, 'state', f.public_flow_state), f.terminal_at_ms, '', '',
             [[flow origin f]]
      from f)
    select public_flow_state from f
    """,
    Planning.CUSTOM,
)

# $1 partition_key, $2 flow_id, $3 limit
TAKE_OWED: Final = Statement(
    "take_owed",
    """
    with d as materialized (
      select partition_key, flow_id, execution_id, work from ff_cascade_owed
      where partition_key = $1 and flow_id = $2 order by execution_id, work limit $3)
    delete from ff_cascade_owed t using d
    where t.partition_key = d.partition_key and t.flow_id = d.flow_id and t.execution_id = d.execution_id
      and t.work = d.work
    returning t.execution_id, t.work, t.reason
    """,
    Planning.CUSTOM,
)

SATISFIED_REASON: Final = "sibling_quorum_satisfied"
IMPOSSIBLE_REASON: Final = "sibling_quorum_impossible"


class Moved:
    """What a cascade did, to be announced once its transaction has committed."""

    def __init__(self) -> None:
        self.lanes: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.owed = 0
        self.is_flow_ended = False

    def announce(self, runtime: Runtime) -> None:
        """Ring for whoever waits for this, and count it."""
        rings = [work_ring(lane) for lane in sorted(self.lanes)]
        if self.counts["skipped"] or self.counts["cancelled"]:
            rings += [(Channel.COMPLETION.value, ""), (Channel.LEASE.value, "")]
        if self.is_flow_ended:
            rings.append((Channel.OPERATOR.value, ""))
        runtime.ring(tuple(rings))
        for outcome, count in self.counts.items():
            CASCADE_EXECUTIONS.labels(outcome).inc(count)
        if self.owed:
            CASCADE_OWED.inc(self.owed)


async def owe(connection: Connection, flow: FlowKey, work: str, reasons: dict[UUID, str], moved: Moved) -> None:
    """Record work that this transaction leaves undone."""
    if reasons:
        ids = sorted(reasons)
        await connection.fetch(OWE.sql, *flow, ids, work, [reasons[one] for one in ids])
        moved.owed += len(ids)


async def cascade(connection: Connection, flow: FlowKey, ended: Iterable[UUID], moved: Moved, *, sealed: bool) -> None:
    """Carry the endings of members through their flow, then end the flow if they were its last."""
    frontier = sorted(ended)
    budget = CASCADE_MAX
    while frontier:
        if budget <= 0:
            await owe(connection, flow, "resolve", dict.fromkeys(frontier, ""), moved)
            break
        rows = await connection.fetch(RESOLVE_EDGES.sql, *flow, frontier, budget)
        edges = sum(row["edges"] for row in rows)
        if edges >= budget:
            # There may be more edges of the same executions.
            await owe(connection, flow, "resolve", dict.fromkeys(frontier, ""), moved)
        budget -= edges
        children = [row["downstream_eid"] for row in rows]
        frontier, losers = await decide(connection, flow, children, moved, sealed=sealed)
        frontier += await cancel_losers(connection, flow, losers, moved, limit=max(budget, 0))
        budget -= len(frontier)
        frontier.sort()
    await end_flow(connection, flow, moved)


async def decide(
    connection: Connection, flow: FlowKey, children: Sequence[UUID], moved: Moved, *, sealed: bool
) -> tuple[list[UUID], dict[UUID, str]]:
    """Let the groups of these children decide. Who was skipped, and who has lost a race, with the reason."""
    if not children:
        return [], {}
    rows = await connection.fetch(DECIDE_CHILDREN.sql, *flow, sorted(children), sealed)
    skipped = [row["execution_id"] for row in rows if row["next_row"] == "skipped"]
    moved.counts["skipped"] += len(skipped)
    moved.counts["released"] += len(rows) - len(skipped)
    moved.lanes |= {row["lane_id"] for row in rows if row["next_row"].startswith("waiting")}
    return skipped, await _losers(connection, flow, rows)


async def decide_one(connection: Connection, flow: FlowKey, child: UUID, moved: Moved, *, sealed: bool) -> str | None:
    """Let one child's group decide and carry on from there; `released`, `skipped`, or None while it is pending."""
    before = moved.counts["released"]
    skipped, losers = await decide(connection, flow, [child], moved, sealed=sealed)
    cancelled = await cancel_losers(connection, flow, losers, moved, limit=CASCADE_MAX)
    if skipped or cancelled:
        await cascade(connection, flow, [*skipped, *cancelled], moved, sealed=sealed)
    if skipped:
        return "skipped"
    return "released" if moved.counts["released"] > before else None


async def _losers(connection: Connection, flow: FlowKey, decided: Sequence[Row]) -> dict[UUID, str]:
    reasons = {
        row["execution_id"]: IMPOSSIBLE_REASON if row["next_row"] == "skipped" else SATISFIED_REASON
        for row in decided
        if row["cancels"]
    }
    if not reasons:
        return {}
    rows = await connection.fetch(LOSERS.sql, *flow, list(reasons))
    return {row["upstream_eid"]: reasons[row["child"]] for row in rows}


async def cancel_losers(
    connection: Connection, flow: FlowKey, losers: dict[UUID, str], moved: Moved, *, limit: int
) -> list[UUID]:
    """Cancel who lost, up to a limit; the others, and those whose rows somebody holds, are owed."""
    if not losers:
        return []
    order = sorted(losers)
    done, held = await cancel_free(
        connection, flow.partition_key, {one: losers[one] for one in order[:limit]}, "flow_cascade"
    )
    moved.counts["cancelled"] += len(done)
    await owe(connection, flow, "cancel", {one: losers[one] for one in (*held, *order[limit:])}, moved)
    return done


async def end_flow(connection: Connection, flow: FlowKey, moved: Moved) -> None:
    """End a sealed flow if no member is left."""
    if await connection.fetchrow(END_FLOW.sql, *flow) is not None:
        moved.is_flow_ended = True


async def settle_owed(runtime: Runtime, flow: FlowKey, lock: LockFlow = lock_flow) -> int:
    """Do what a flow is owed, up to the bound of one call; how many records were worked off."""

    async def body(connection: Connection) -> tuple[Moved, int]:
        moved = Moved()
        row = await lock(connection, flow)
        owed = await connection.fetch(TAKE_OWED.sql, *flow, CASCADE_MAX)
        losers = {one["execution_id"]: one["reason"] for one in owed if one["work"] == "cancel"}
        ended = [one["execution_id"] for one in owed if one["work"] == "resolve"]
        ended += await cancel_losers(connection, flow, losers, moved, limit=CASCADE_MAX)
        await cascade(connection, flow, set(ended), moved, sealed=is_sealed(row))
        return moved, len(owed)

    moved, count = await runtime.db.transact("settle_owed", body, Planning.CUSTOM)
    moved.announce(runtime)
    return count
