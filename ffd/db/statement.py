"""Named SQL: the name is the metric label and a comment in the text that the server sees."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from ffd.core.state import expand_rows


class Planning(StrEnum):
    """How the server should plan a statement; each has its own connections (see `ffd.db.database`).

    `GENERIC`: one row by its key, planned once per connection. `CUSTOM`: batches over arrays, planned per call,
    because a plan cached over an empty table may scan a whole index later. `READ`: lists and reports, planned
    the same way on connections of their own, so that a slow list never keeps a batch waiting.
    """

    GENERIC = "generic"
    CUSTOM = "custom"
    READ = "read"


# What many statements must say in exactly the same words.
_PHRASES: Final = {
    # The predicate of the claim index, word for word.
    "claimable": "lifecycle_phase in ('runnable', 'submitted') and eligibility_state = 'eligible_now'",
    "into lease_event": (
        "insert into ff_lease_event (partition_key, execution_id, event_type, cause, occurred_at_ms,"
        " attempt_index, lease_epoch, worker_id, worker_instance_id, namespace, instance_tag, tags)"
    ),
    # Marked as dispatched from the start: a FlowFabric dispatcher must not count what ffd's own cascade counts.
    "into completion_event": (
        "insert into ff_completion_event (partition_key, execution_id, flow_id, outcome, occurred_at_ms,"
        " dispatched_at_ms, namespace, instance_tag, tags)"
    ),
    "into cascade_owed": (
        "insert into ff_cascade_owed (partition_key, flow_id, execution_id, work, reason, enqueued_at_ms)"
    ),
    "into operator_event": (
        "insert into ff_operator_event (partition_key, execution_id, event_type, details, occurred_at_ms, actor,"
        " reason, namespace, instance_tag, tags)"
    ),
}
# Namespace and tags of an event, from the execution's raw_fields.
_ORIGIN: Final = re.compile(r"\[\[origin (\w+)\]\]")
_ORIGIN_COLUMNS: Final = (
    r"\1.raw_fields ->> 'namespace', \1.raw_fields #>> '{tags,cairn.instance_id}', \1.raw_fields -> 'tags'"
)
# The same of a flow, whose tags stand beside its other fields; their keys have a dot.
_FLOW_ORIGIN: Final = re.compile(r"\[\[flow origin (\w+)\]\]")
_FLOW_ORIGIN_COLUMNS: Final = (
    r"\1.raw_fields ->> 'namespace', \1.raw_fields ->> 'cairn.instance_id',"
    r" (select jsonb_object_agg(key, value) from jsonb_each(\1.raw_fields) where key like '%.%')"
)
# An edge is looked up by one of its executions; its flow is only checked, in words that no index answers to. The key of
# the table would do for the planner, which takes (partition_key, flow_id) for unique, and read every edge of the flow.
_OF_ITS_FLOW: Final = re.compile(r"\[\[of its flow (\w+)\]\]")
_OF_ITS_FLOW_WORDS: Final = r"(partition_key = \1.p and flow_id = \1.f) is true"

# Rows that a reconciler could not move are left alone until their time comes again: by its probe, over a partition `p`,
# and by its sweep, of partition $1; entities that $3 names are swept in any case. Read once per partition and not per
# row, because there are hardly ever any.
_QUARANTINED: Final = (
    r"all (array(select k.entity_id from ff_quarantine k where k.partition_key = {}"
    r" and k.reconciler = '\1' and k.retry_at_ms > ff_now_ms()))"
)
_NOT_QUARANTINED: Final = re.compile(r"\[\[not quarantined (\w+) (\w+)\.(\w+)\]\]")
_NOT_QUARANTINED_WORDS: Final = rf"\2.\3 <> {_QUARANTINED.format('p.partition_key')}"
_WANTED: Final = re.compile(r"\[\[wanted (\w+) (\w+)\.(\w+)\]\]")
_WANTED_WORDS: Final = (
    rf"case when $3::uuid[] is null then \2.\3 <> {_QUARANTINED.format('$1')} else \2.\3 = any ($3::uuid[]) end"
)


def _expand(sql: str, phrases: Mapping[str, str]) -> str:
    for phrase, text in {**phrases, **_PHRASES}.items():
        sql = sql.replace(f"[[{phrase}]]", text)
    sql = _NOT_QUARANTINED.sub(_NOT_QUARANTINED_WORDS, _WANTED.sub(_WANTED_WORDS, sql))
    sql = _FLOW_ORIGIN.sub(_FLOW_ORIGIN_COLUMNS, _ORIGIN.sub(_ORIGIN_COLUMNS, sql))
    return expand_rows(_OF_ITS_FLOW.sub(_OF_ITS_FLOW_WORDS, sql))


class Statement:
    """One SQL statement, complete and constant. What stands in double brackets is expanded once, here.

    `phrases` are texts that several statements of one module share, by the name they have in the brackets.
    """

    __slots__ = ("name", "planning", "sql")

    def __init__(
        self,
        name: str,
        sql: str,
        planning: Planning = Planning.GENERIC,
        phrases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.planning = planning
        self.sql = f"/* ffd:{name} */ {_expand(sql, phrases).strip()}"

    def __repr__(self) -> str:
        return f"Statement({self.name!r})"
