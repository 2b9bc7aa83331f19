"""How long a claim takes when a lane is deep, when much of it cannot be claimed, and when it is almost empty.

Each case is a database of its own, all on one server. One claim of each case follows the other, in random order,
so that whatever else happens hits all alike. Every 100 claims the cases are refilled, outside the timed part, so
that each keeps its depth. p99 is taken per round over all claims of the round; none is discarded.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from benchmarks.bench import Bench, connected, settle
from benchmarks.report import Bound, Figure, Finding, compare, percentile
from benchmarks.workload import LEASE_TTL_MS, PAYLOAD, fill
from ffd import Engine
from ffd.db.statement import Statement

LANE: Final = "bench"
WAITING: Final = 1_000
REFILL_EVERY: Final = 100
# Requirements that the worker lacks, spread over this many sets: a claim looks at each set of the lane.
UNMATCHABLE_SETS: Final = 10
CAPABILITIES: Final = ("cpu",)


@dataclass(frozen=True)
class Case:
    """What a lane holds besides what is claimed."""

    name: str
    bound: Bound | None = None
    waiting: int = WAITING
    unmatchable: int = 0
    delayed: int = 0
    running: int = 0


# $1 how many, $2 lane, $3 the row of the state vector, $4 priority, $5 number of sets that require what nobody has,
# $6 payload, $7 lease_ttl_ms. Ids and creation times ascend together, as the engine's do.
LOAD: Final = Statement(
    "bench_load",
    """
    with k as (
      select ff_now_ms() - $1::int + i as created, i, $3::text as state_row from generate_series(1, $1::int) i),
    x as (
      insert into ff_exec_core (partition_key, execution_id, lane_id, required_capabilities, priority, payload,
        raw_fields, created_at_ms, state_since_ms, delay_until_ms, lease_epoch, [[columns]])
      select floor(random() * 256)::int,
             (lpad(to_hex(k.created), 12, '0') || '7' || substr(md5(random()::text), 1, 3) || '8'
              || substr(md5(random()::text), 1, 15))::uuid,
             $2::text, case when $5::int > 0 then array['gpu-' || k.i % $5::int] else '{}' end, $4::int, $6::bytea,
             '{"namespace": "default", "execution_kind": "bench"}', k.created, k.created,
             case k.state_row when 'delayed_first' then ff_now_ms() + $7::bigint end,
             case k.state_row when 'running' then 1 else 0 end,
             [[values by k.state_row: waiting_first, delayed_first, running]]
      from k
      returning partition_key, execution_id, lifecycle_phase)
    insert into ff_attempt (partition_key, execution_id, attempt_index, worker_id, worker_instance_id, lease_epoch,
                            lease_expires_at_ms, started_at_ms)
    select partition_key, execution_id, 0, 'other', 'other-1', 1, ff_now_ms() + $7::bigint, ff_now_ms()
    from x where lifecycle_phase = 'active'
    """,
)


DEPTH: Final = Statement(
    "bench_depth",
    """
    select count(*) filter (where [[claimable]] and required_capabilities = '{}'),
           count(*) filter (where [[claimable]] and required_capabilities <> '{}'),
           count(*) filter (where eligibility_state = 'not_eligible_until_time'),
           (select count(*) from ff_attempt where worker_id = 'other' and lease_expires_at_ms > ff_now_ms())
    from ff_exec_core
    """,
)


def _cases(bench: Bench) -> tuple[Case, ...]:
    deep = bench.size(1_000_000, 20_000)
    aside = bench.size(100_000, 5_000)
    return (
        Case(f"{WAITING:,} waiting"),
        Case(f"{deep:,} waiting", Bound("at most", 1.5), waiting=deep),
        Case(f"{aside:,} unmatchable at the head", Bound("at most", 2), unmatchable=aside),
        Case(f"{aside:,} delayed, {aside:,} running", Bound("at most", 1.5), delayed=aside, running=aside),
    )


async def run(bench: Bench) -> list[Finding]:
    """Load every case, then claim from all of them in turns."""
    claims = bench.size(2_000, 100)
    cases = {case.name: case for case in _cases(bench)}
    rounds: dict[str, list[list[float]]] = {name: [] for name in cases}
    async with AsyncExitStack() as stack:
        engines, dsns = {}, {}
        for name, case in cases.items():
            bench.progress(f"claim_latency: loading {name}")
            dsn = await stack.enter_async_context(bench.database())
            await load(dsn, case)
            engines[name] = await stack.enter_async_context(Engine.connect(dsn, pool_max=1))
            dsns[name] = dsn
        await _claim_in_turns(bench, engines, REFILL_EVERY)
        for number in range(1, bench.rounds + 1):
            bench.progress(f"claim_latency: round {number}/{bench.rounds}, {claims:,} claims of each case")
            taken = await _claim_in_turns(bench, engines, claims)
            for name, seconds in taken.items():
                rounds[name].append(seconds)
        for name, case in cases.items():
            await _check_depth(dsns[name], case)
    return _findings(cases, rounds)


async def load(dsn: str, case: Case) -> None:
    """Fill a database as the case says; what cannot be claimed has the higher priority."""
    async with connected(dsn) as sql:
        for count, row, priority, sets in (
            (case.waiting, "waiting_first", 0, 0),
            (case.unmatchable, "waiting_first", 9, UNMATCHABLE_SETS),
            (case.delayed, "delayed_first", 9, 0),
            (case.running, "running", 9, 0),
        ):
            await sql.execute(LOAD.sql, count, LANE, row, priority, sets, PAYLOAD, 3_600_000)
    await settle(dsn, has_checkpoint=True)


async def _check_depth(dsn: str, case: Case) -> None:
    """A case that has lost its depth on the way would have measured something else."""
    async with connected(dsn) as sql:
        found = await sql.fetchrow(DEPTH.sql)
    if found is None or tuple(found) != (case.waiting, case.unmatchable, case.delayed, case.running):
        raise RuntimeError(f"{case} ended with {found}")


async def _claim_in_turns(bench: Bench, engines: dict[str, Engine], claims: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for start in range(0, claims, REFILL_EVERY):
        size = min(REFILL_EVERY, claims - start)
        for _ in range(size):
            for name in bench.shuffled(engines):
                taken[name].append(await _timed_claim(engines[name]))
        for engine in engines.values():
            await fill(engine, LANE, size)
    return taken


async def _timed_claim(engine: Engine) -> float:
    started = time.perf_counter()
    claim = await engine.claim(
        LANE, worker_id="bench", worker_instance_id="b-1", capabilities=CAPABILITIES, lease_ttl_ms=LEASE_TTL_MS
    )
    spent_s = time.perf_counter() - started
    assert claim is not None
    return spent_s


def _findings(cases: dict[str, Case], rounds: dict[str, list[list[float]]]) -> list[Finding]:
    base, *others = cases
    findings = []
    for percent in (99, 50):
        figures = {
            name: [Figure(percentile(each, percent) * 1e3, "ms", "") for each in taken]
            for name, taken in rounds.items()
        }
        against = [Figure(figure.value, "ms", f"with {base}") for figure in figures[base]]
        findings += [
            compare(f"claim p{percent}, {name}", figures[name], against, cases[name].bound if percent == 99 else None)
            for name in others
        ]
    return findings
