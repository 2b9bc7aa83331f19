"""How a reconciler says what is due: once, for the probe over many partitions and for the search after a failure.

The probe and the sweep must agree. A row that a probe finds and no sweep moves keeps a daemon busy for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple
from uuid import UUID

from ffd.db.statement import Planning, Statement

# Restricts a tick to these entities; None for whatever is due.
Only = Sequence[UUID] | None

# A source is a query over one partition `p` that gives (entity_id, due_at_ms), what is due first in front.
_PROBE = """
    with d as materialized (
      select p.partition_key, n.due_at_ms, ff_now_ms() as now_ms
      from unnest($1::smallint[]) p(partition_key) cross join lateral ({sources}) n)
    select ff_now_ms() as now_ms, min(due_at_ms) as first_at_ms,
           min(due_at_ms) filter (where due_at_ms > now_ms) as next_at_ms,
           coalesce(array_agg(distinct partition_key) filter (where due_at_ms <= now_ms), '{{}}') as due
    from d
"""
_CANDIDATES = """
    select n.entity_id from unnest($1::smallint[]) p(partition_key) cross join lateral ({sources}) n
    where n.due_at_ms <= ff_now_ms() and n.entity_id is not null order by n.due_at_ms limit $2
"""


def due_statements(
    reconciler: str, *sources: str, phrases: Mapping[str, str] = MappingProxyType({})
) -> tuple[Statement, Statement]:
    """The probe over an array of partitions ($1) and the due entities in them, up to $2 of each source.

    A source may take parameters of its own from $3 on.
    """
    each = " union all ".join(f"({source} limit $2)" for source in sources)
    return (
        Statement(f"{reconciler}_probe", _PROBE.format(sources=each), phrases=phrases),
        Statement(f"{reconciler}_candidates", _CANDIDATES.format(sources=each), Planning.CUSTOM, phrases),
    )


class Look(NamedTuple):
    """What a probe saw, on the database clock."""

    now_ms: int
    first_at_ms: int | None
    next_at_ms: int | None
    due: list[int]

    @property
    def lag_ms(self) -> int:
        """How long the oldest due row has been waiting."""
        return 0 if self.first_at_ms is None or not self.due else max(0, self.now_ms - self.first_at_ms)
