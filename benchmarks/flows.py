"""What a flow costs, side by side with the same work without one: solo executions, the same workers, in turns.

Ending a member is a transaction that holds the flow's row, so members of one flow end one after the other, however
many workers there are: a chain and a fan show that price, many small flows show it spread. A slice's time ends with
its last complete; workers that wait for more in vain do not count. A hop is a complete and the claim after it.

Bytes of WAL cover a whole life: submitted or created, claimed, completed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from statistics import median
from typing import Any, Final, NamedTuple

import asyncpg

from benchmarks.bench import Bench, connected, settle
from benchmarks.report import Bound, Figure, Finding, compare, percentile
from benchmarks.workload import LEASE_TTL_MS, RESULT, WORKERS, fill, new_executions, spend
from ffd import Engine, FlowSpec, FlowState

CANCEL_BOUND: Final = Bound("at most", 50)
CANCELS: Final = 20
WAIT_MS: Final = 100
# A thousand members of one flow end one by one, which takes long.
LONG_ROUNDS: Final = 3
_FLOW, _SOLO = "flow", "solo"
_WAL = "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"


class Worked(NamedTuple):
    """One side of one round: how long it took, its hops, its completes in the order of their ends, its WAL."""

    wall_s: float
    hops_s: list[float]
    completes_s: list[float]
    wal_bytes: int


Rounds = dict[str, list[Worked]]
Specs = Callable[[str], list[FlowSpec]]


def chain(lane: str, length: int) -> FlowSpec:
    """One after the other."""
    return _spec(lane, length, [(at, at + 1) for at in range(length - 1)])


def fan(lane: str, leaves: int) -> FlowSpec:
    """One root, many leaves, one join."""
    join = leaves + 1
    return _spec(lane, leaves + 2, [edge for leaf in range(1, join) for edge in ((0, leaf), (leaf, join))])


def ten_nodes(lane: str) -> FlowSpec:
    """A root, four branches of two, a join."""
    return _spec(lane, 10, [edge for at in range(1, 5) for edge in ((0, at), (at, at + 4), (at + 4, 9))])


def _spec(lane: str, size: int, edges: list[tuple[int, int]]) -> FlowSpec:
    nodes = {str(at): new for at, new in enumerate(new_executions(lane, size))}
    return FlowSpec(nodes, [(str(upstream), str(downstream)) for upstream, downstream in edges])


async def run(bench: Bench) -> list[Finding]:
    """Chains, fans, many small flows and cancels, each against its counterpart."""
    length, leaves, flows = bench.size(100, 20), bench.size(1_000, 100), bench.size(100, 16)
    rounds = min(bench.rounds, LONG_ROUNDS)
    async with bench.database() as dsn, Engine.connect(dsn, pool_max=WORKERS) as engine, connected(dsn) as sql:
        sides = _Sides(bench, engine, sql)
        await sides.in_turns("warm-up", lambda lane: [ten_nodes(lane) for _ in range(WORKERS)], WORKERS, 1)
        await settle(dsn)
        linear = await sides.in_turns(f"chain of {length}", lambda lane: [chain(lane, length)], 1, bench.rounds)
        wide = await sides.in_turns(f"fan of {leaves:,}", lambda lane: [fan(lane, leaves)], WORKERS, rounds)
        many = await sides.in_turns(
            f"{flows} flows of 10", lambda lane: [ten_nodes(lane) for _ in range(flows)], WORKERS, rounds
        )
        cancels = await _cancels(bench, engine, bench.size(1_000, 100))
    each = f"{WORKERS} workers ({rounds} rounds)"
    return [
        _rates(f"chain of {length}, 1 worker", length, linear),
        *(_latencies(f"chain of {length}, hop p{percent}", linear, percent) for percent in (50, 99)),
        _rates(f"fan-out and fan-in of {leaves:,}, {each}", leaves + 2, wide),
        _one_complete(f"complete that releases {leaves:,} children", wide, 0),
        _one_complete(f"complete that ends a flow of {leaves + 2:,}", wide, -1),
        _rates(f"{flows} flows of 10, {each}", flows * 10, many),
        _written(f"WAL per member, chain of {length}", length, linear),
        _written(f"WAL per member, fan of {leaves:,}", leaves + 2, wide),
        _written(f"WAL per member, {flows} flows of 10", flows * 10, many),
        cancels,
    ]


class _Sides:
    """The same work as flows and without."""

    def __init__(self, bench: Bench, engine: Engine, sql: asyncpg.Connection[Any]) -> None:
        self._bench = bench
        self._engine = engine
        self._sql = sql
        self._lanes = count(1)

    async def in_turns(self, what: str, specs: Specs, workers: int, rounds: int) -> Rounds:
        """Both sides in every round."""
        found: Rounds = {_FLOW: [], _SOLO: []}
        for number in range(1, rounds + 1):
            for name in self._bench.shuffled(found):
                self._bench.progress(f"flows, {what}: round {number}/{rounds}, {name}")
                found[name].append(await self._side(specs, workers, is_flow=name == _FLOW))
        return found

    async def _side(self, specs: Specs, workers: int, *, is_flow: bool) -> Worked:
        """One side on a lane of its own."""
        lane = f"bench-{next(self._lanes)}"
        wanted = specs(lane)
        size = sum(len(spec.nodes) for spec in wanted)
        before = await self._sql.fetchval(_WAL)
        flows = []
        if is_flow:
            flows = [(await self._engine.submit_flow(spec)).flow_id for spec in wanted]
        else:
            await fill(self._engine, lane, size)
        worked = await self._work_off(lane, size, workers)
        written = await self._sql.fetchval(_WAL) - before
        for flow_id in flows:
            flow = await self._engine.describe_flow(flow_id)
            if flow is None or flow.state != FlowState.COMPLETED:
                raise RuntimeError(f"a flow whose members have completed is {flow}")
        return worked._replace(wal_bytes=int(written))

    async def _work_off(self, lane: str, size: int, workers: int) -> Worked:
        """Claim and complete until the lane's executions have ended."""
        hops: list[float] = []
        completes: list[float] = []
        ended = started = time.perf_counter()

        async def work(number: int) -> None:
            nonlocal ended
            called = None
            while len(completes) < size:
                claim = await self._engine.claim(
                    lane,
                    worker_id="bench",
                    worker_instance_id=f"bench-{number}",
                    lease_ttl_ms=LEASE_TTL_MS,
                    wait_ms=WAIT_MS,
                )
                if claim is None:
                    continue
                if called is not None:
                    hops.append(time.perf_counter() - called)
                called = time.perf_counter()
                await self._engine.complete(claim.handle, RESULT)
                ended = time.perf_counter()
                completes.append(ended - called)

        await asyncio.gather(*(work(number) for number in range(workers)))
        return Worked(ended - started, hops, completes, 0)


async def _cancels(bench: Bench, engine: Engine, members: int) -> Finding:
    """Cancel whole flows, and in turns single members of another flow of the same size."""
    pairs = bench.size(CANCELS, 4)
    what = f"cancel_flow with {members:,} members"
    other = await engine.submit_flow(fan("cancel", members - 2))
    flows = [await engine.submit_flow(fan("cancel", members - 2)) for _ in range(pairs)]

    async def whole(at: int) -> None:
        answer = await engine.cancel_flow(flows[at].flow_id, reason="bench")
        if len(answer.member_execution_ids) != members or answer.pending_execution_ids:
            raise RuntimeError(f"{len(answer.pending_execution_ids)} members are left to be cancelled")

    async def member(at: int) -> None:
        await engine.cancel_execution(other.execution_ids[str(at + 1)], reason="bench")

    bench.progress(f"flows, {what}: {pairs} of them and {pairs} of single members in turns")
    calls: dict[str, Callable[[int], Awaitable[None]]] = {_FLOW: whole, _SOLO: member}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(pairs):
        for name in bench.shuffled(calls):
            taken[name].append((await spend(partial(calls[name], at))).wall_s * 1e3)
    # As the bound is stated: one median against the other.
    flow, one = median(taken[_FLOW]), median(taken[_SOLO])
    against = Figure(one, "ms", "cancel_execution of one")
    return Finding(what, Figure(flow, "ms", ""), against, (flow / one,), CANCEL_BOUND)


def _rates(what: str, size: int, rounds: Rounds) -> Finding:
    return _compare(what, rounds, "/s", lambda each: size / each.wall_s)


def _latencies(what: str, rounds: Rounds, percent: int) -> Finding:
    return _compare(what, rounds, "ms", lambda each: percentile(each.hops_s, percent) * 1e3)


def _written(what: str, size: int, rounds: Rounds) -> Finding:
    return _compare(what, rounds, "bytes", lambda each: each.wal_bytes / size)


def _compare(what: str, rounds: Rounds, unit: str, value: Callable[[Worked], float]) -> Finding:
    flow, solo = ([Figure(value(each), unit, name) for each in rounds[name]] for name in (_FLOW, _SOLO))
    return compare(what, flow, solo)


def _one_complete(what: str, rounds: Rounds, at: int) -> Finding:
    """A single call of every round, against the median complete of the same round's solo executions."""
    return compare(
        what,
        [Figure(each.completes_s[at] * 1e3, "ms", "") for each in rounds[_FLOW]],
        [Figure(median(each.completes_s) * 1e3, "ms", _SOLO) for each in rounds[_SOLO]],
    )
