"""Which partitions this node sweeps.

Every node keeps a row in `ff_node` alive on the database clock, and every node computes the same wanted owner of each
partition by rendezvous hashing over the live nodes. The actual owner stands in `ff_partition`, valid while its node is
alive and written only when the partition moves. A node gives up what is wanted elsewhere, when its sweep of it has come
to an end, and takes what is wanted here and belongs to nobody alive. So a join or a leave moves about 1/n of the
partitions, within two heartbeats of two nodes; a node that vanished is followed when its row has run out.

A node that cannot renew its row stops before the row runs out: its own deadline counts, on the host's monotonic clock,
from when the last successful heartbeat was sent. Two nodes may still sweep one partition for a moment (a paused process
that wakes up within a statement); that wastes work and breaks nothing, because sweeps skip what others hold and judge
every row on its newest version.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import anyio

from ffd.core.errors import EngineError, Unavailable
from ffd.core.limits import PARTITIONS
from ffd.core.rendezvous import choose
from ffd.daemon.tasks import Task
from ffd.db.statement import Statement
from ffd.ops.runtime import Runtime
from ffd.telemetry.logging import get_logger
from ffd.telemetry.metrics import PARTITIONS_OWNED

# Of the lease: how often it is renewed, and how long before its end this node stops.
BEAT_FRACTION: Final = 1 / 3
MARGIN_FRACTION: Final = 1 / 5
# The database clock and the host's may drift apart by this much between two heartbeats.
CLOCK_STEP_MS: Final = 2_000
# How long a partition that made no progress here is left to others.
AVOID_MS: Final = 60_000

# $1 node_id, $2 name, $3 version, $4 ttl_ms. What this statement inserts it does not see, hence "others".
BEAT: Final = Statement(
    "beat",
    """
    with h as (
      insert into ff_node as t (node_id, name, version, started_at_ms, heartbeat_at_ms, expires_at_ms)
      values ($1, $2, $3, ff_now_ms(), ff_now_ms(), ff_now_ms() + $4::bigint)
      on conflict (node_id) do update set heartbeat_at_ms = excluded.heartbeat_at_ms,
        expires_at_ms = excluded.expires_at_ms)
    select ff_now_ms() as now_ms,
           (select coalesce(array_agg(node_id), '{}') from ff_node
            where expires_at_ms > ff_now_ms() and node_id <> $1) as others,
           array_agg(coalesce(node_id, '') order by partition_key) as owners,
           array_agg(case when avoid_until_ms > ff_now_ms() then avoid_node_id end order by partition_key) as avoided
    from ff_partition
    """,
)
# $1 node_id, $2 partitions. From nobody, or from a node that is not alive any more.
TAKE: Final = Statement(
    "take_partitions",
    """
    with l as materialized (
      select partition_key from ff_partition p
      where p.partition_key = any ($2::smallint[])
        and (p.node_id is null or not exists (
          select 1 from ff_node n where n.node_id = p.node_id and n.expires_at_ms > ff_now_ms()))
      order by partition_key for update skip locked)
    update ff_partition t set node_id = $1, epoch = t.epoch + 1, moved_at_ms = ff_now_ms()
    from l where t.partition_key = l.partition_key
    returning t.partition_key, t.epoch
    """,
)
# $1 node_id, $2 partitions, $3 for how long this node is avoided.
GIVE_UP: Final = Statement(
    "give_up_partitions",
    """
    with l as materialized (
      select partition_key from ff_partition
      where partition_key = any ($2::smallint[]) and node_id = $1 order by partition_key for update)
    update ff_partition t set node_id = null, epoch = t.epoch + 1, moved_at_ms = ff_now_ms(),
      avoid_node_id = case when $3::bigint > 0 then $1 else t.avoid_node_id end,
      avoid_until_ms = case when $3::bigint > 0 then ff_now_ms() + $3::bigint else t.avoid_until_ms end
    from l where t.partition_key = l.partition_key
    returning t.partition_key
    """,
)
LEAVE: Final = Statement("leave", "delete from ff_node where node_id = $1")

ALL_PARTITIONS: Final = range(PARTITIONS)

_log = get_logger("ownership")


class Node(NamedTuple):
    """Who this is: a name for people and an id that no other process ever had."""

    node_id: str
    name: str
    version: str


class Work(Protocol):
    """What is done with owned partitions."""

    def begin(self, partitions: Iterable[int]) -> None:
        """These are ours now."""

    async def finish(self, partitions: Iterable[int]) -> None:
        """Begin nothing more with these, and return when what is under way has ended; cancelled, end it."""

    def abandon(self, partitions: Iterable[int]) -> None:
        """These are not ours any more: stop at once."""

    def failing(self) -> Sequence[int]:
        """With which of them no progress is made."""

    def suspect(self, why: str) -> None:
        """Time may have passed for leases that did not pass for their owners."""


class Owner:
    """Keeps this node alive and holds what it owns."""

    def __init__(
        self,
        runtime: Runtime,
        node: Node,
        ttl_ms: int,
        work: Work,
    ) -> None:
        self.node = node
        self._runtime = runtime
        self._ttl_s = ttl_ms / 1000
        self._work = work
        self._deadline = 0.0
        self._owned: frozenset[int] = frozenset()
        self._last_beat: tuple[float, int] | None = None
        self._is_leaving = False
        self._has_left = False
        self._is_lost = False
        # A heartbeat under way must not bring back a node that is leaving.
        self._beating = anyio.Lock()
        self.has_settled = False
        self.others = 0
        self.last_error: str | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the others still count on this node."""
        return time.monotonic() < self._deadline

    @property
    def owned(self) -> frozenset[int]:
        """What this node may sweep now."""
        return self._owned if self.is_alive else frozenset()

    async def run(self, task: Task) -> None:
        """Beat until cancelled."""
        while True:
            task.progress()
            await self.beat()
            remaining_s = max(0.05, self._deadline - time.monotonic()) if self._owned else self._ttl_s
            pause_s = self._ttl_s * BEAT_FRACTION * random.uniform(0.9, 1.0)  # noqa: S311  (not a secret)
            await anyio.sleep(min(pause_s, remaining_s))

    async def beat(self) -> None:
        """Renew, see who else is there, give and take."""
        async with self._beating:
            if not self._has_left:
                await self._beat()

    async def _beat(self) -> None:
        if self._owned and not self.is_alive:
            self._lose()
        sent = time.monotonic()
        lease_s = self._ttl_s * (1 - MARGIN_FRACTION)
        timeout_s = max(0.05, self._deadline - sent) if self._owned and self.is_alive else lease_s
        try:
            with anyio.fail_after(timeout_s):
                (row,) = await self._runtime.db.fetch(BEAT, *self.node, int(self._ttl_s * 1000))
        except (EngineError, TimeoutError) as error:
            self._missed(error)
            return
        self._deadline = sent + lease_s
        self._notice_time(sent, row["now_ms"])
        if self.last_error is not None:
            _log.info("heartbeat_back", node=self.node.node_id)
            self.last_error = None
        if self._is_lost:
            self._is_lost = False
            self._work.suspect("outage")
        try:
            with anyio.fail_after(max(0.05, self._deadline - time.monotonic())):
                await self._settle(row["others"], row["owners"], row["avoided"])
        except (EngineError, TimeoutError) as error:
            self._missed(error)

    def _missed(self, error: Exception) -> None:
        """A heartbeat did not get through. Until the deadline nothing changes; after it, nothing is owned."""
        reason = error.detail if isinstance(error, Unavailable) else type(error).__name__
        if self.last_error is None:
            _log.warning("heartbeat_missed", node=self.node.node_id, error=reason, owned=len(self._owned))
        self.last_error = reason
        if not self.is_alive and not self._is_lost:
            self._lose()

    def _lose(self) -> None:
        """Stop everything: the others may have taken over."""
        self._is_lost = True
        _log.error("node_lease_lost", node=self.node.node_id, partitions=len(self._owned))
        self._drop(self._owned)

    def _notice_time(self, sent: float, now_ms: int) -> None:
        """Compare how far the two clocks came since the last heartbeat: a step of the database's expires leases."""
        if self._last_beat is not None:
            passed_ms = (sent - self._last_beat[0]) * 1000
            stepped_ms = int(now_ms - self._last_beat[1] - passed_ms)
            if abs(stepped_ms) > CLOCK_STEP_MS:
                _log.warning("database_clock_stepped", by_ms=stepped_ms)
                self._work.suspect("clock step")
        self._last_beat = (sent, now_ms)

    async def _settle(self, others: list[str], owners: list[str], avoided: list[str | None]) -> None:
        me = self.node.node_id
        live = [me, *others]
        mine = frozenset(at for at in ALL_PARTITIONS if owners[at] == me)
        wanted = frozenset(at for at in ALL_PARTITIONS if _choose(at, live, avoided[at]) == me)
        failing = frozenset(self._work.failing()) & mine if others else frozenset()
        if lost := self._owned - mine:
            _log.warning("partitions_lost", node=me, partitions=len(lost))
            self._drop(lost)
        surplus = (mine - wanted) | failing
        self._take_up(mine - surplus)
        await self._give_up(surplus - failing, 0)
        await self._give_up(failing, AVOID_MS)
        if self._is_leaving:
            return
        free = sorted(at for at in wanted - mine - failing if owners[at] not in live)
        taken = [row["partition_key"] for row in await self._runtime.db.fetch(TAKE, me, free)] if free else []
        self._take_up(taken)
        if taken or surplus or len(others) != self.others or not self.has_settled:
            _log.info(
                "partitions_changed",
                node=me,
                nodes=len(live),
                owned=len(self._owned),
                taken=len(taken),
                given=len(surplus),
            )
        self.others = len(others)
        self.has_settled = True

    async def _give_up(self, partitions: Iterable[int], avoid_ms: int) -> None:
        """Let others have these, after what is under way with them."""
        keys = sorted(partitions)
        if not keys:
            return
        if avoid_ms:
            _log.warning("partitions_given_up", node=self.node.node_id, partitions=keys, reason="no progress")
        # First, so that whatever happens below, what is wanted again is begun again.
        self._set(self._owned - frozenset(keys))
        # A sweep that takes longer than this is cut off: the next heartbeat must not wait for it.
        with anyio.move_on_after(self._ttl_s * BEAT_FRACTION):
            await self._work.finish(keys)
        await self._runtime.db.fetch(GIVE_UP, self.node.node_id, keys, avoid_ms)

    def _take_up(self, partitions: Iterable[int]) -> None:
        if new := frozenset(partitions) - self._owned:
            self._set(self._owned | new)
            self._work.begin(sorted(new))

    def _drop(self, partitions: frozenset[int]) -> None:
        self._work.abandon(partitions)
        self._set(self._owned - partitions)

    def _set(self, partitions: frozenset[int]) -> None:
        self._owned = partitions
        PARTITIONS_OWNED.set(len(partitions))

    def stop_taking(self) -> None:
        """Go on beating for what is owned, but take nothing more."""
        self._is_leaving = True

    async def leave(self) -> None:
        """Give everything back at once: nobody has to wait for this node's row to run out."""
        owned = len(self._owned)
        async with self._beating:
            self._has_left = True
            self._drop(self._owned)
            self._deadline = 0.0
            await self._runtime.db.fetch(GIVE_UP, self.node.node_id, list(ALL_PARTITIONS), 0)
            await self._runtime.db.fetch(LEAVE, self.node.node_id)
        _log.info("left", node=self.node.node_id, partitions=owned)


def _choose(partition: int, live: Sequence[str], avoided: str | None) -> str | None:
    """The wanted owner; a node that got nowhere with a partition is passed over while there is another."""
    return choose(partition, [node for node in live if node != avoided] or live)
