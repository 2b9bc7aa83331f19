"""Random conditions and signal orders against an evaluator written from reference §4.6 and nothing else.

The reference evaluator works on the JSON documents of §2.11, as another implementation would read them.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import asyncpg
import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from ffd import (
    Accepted,
    AllOf,
    ByName,
    Count,
    CountKind,
    Duplicate,
    Engine,
    Fresh,
    OperatorOnly,
    Signal,
    SignalEffect,
    Single,
    State,
    StateKind,
    Suspend,
    Suspended,
    SuspensionAlreadySatisfied,
    TimeoutOnly,
    UsePending,
    Wildcard,
)
from ffd.core.conditions import Condition, SeenSignal, check_condition, condition_document, evaluate, read_condition
from tests.support import WORKER

IS_FULL = bool(os.environ.get("FFD_TEST_FULL"))
KEYS = ("a", "b", "c")
NAMES = ("go", "Go", "stop")

matchers = st.one_of(st.just(Wildcard()), st.sampled_from(NAMES).map(ByName))
key_sets = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True).map(tuple)
singles = st.builds(Single, st.sampled_from(KEYS), matchers)
counts = st.builds(
    Count, st.integers(1, 4), st.sampled_from(CountKind), key_sets, st.one_of(st.none(), matchers)
).filter(lambda count: count.kind != CountKind.DISTINCT_WAITPOINTS or count.n <= len(count.waitpoints))


def all_of(children: st.SearchStrategy[Condition]) -> st.SearchStrategy[Condition]:
    return st.lists(children, min_size=1, max_size=3).map(lambda members: AllOf(tuple(members)))


leaves: st.SearchStrategy[Condition] = st.one_of(singles, counts)
# Depth 1 to 4.
trees = st.one_of(leaves, all_of(st.one_of(leaves, all_of(st.one_of(leaves, all_of(leaves))))))
conditions: st.SearchStrategy[Condition] = st.one_of(
    trees, trees, trees, st.just(OperatorOnly()), st.just(TimeoutOnly())
)
# (waitpoint key, signal id, name, source type, source identity)
arrivals = st.lists(
    st.tuples(
        st.sampled_from(KEYS),
        st.integers(0, 8),
        st.sampled_from(NAMES),
        st.sampled_from(("person", "robot")),
        st.sampled_from(("", "1", "2")),
    ),
    max_size=14,
)
Arrival = tuple[str, int, str, str, str]


def reference_holds(document: Any, signals: list[Arrival]) -> bool:
    """Reference §4.6, from the document."""
    if document in ("OperatorOnly", "TimeoutOnly"):
        return False

    def passes(matcher: Any, name: str) -> bool:
        if matcher is None or matcher == "Wildcard":
            return True
        return bool(matcher["ByName"] == name)

    if "Single" in document:
        single = document["Single"]
        return any(at == single["waitpoint_key"] and passes(single["matcher"], name) for at, _, name, _, _ in signals)
    body = document["Composite"]
    if body["kind"] == "AllOf":
        results = [reference_holds(member, signals) for member in body["members"]]
        return len(results) > 0 and results.count(False) == 0
    tally: list[Any] = []
    for at, number, name, source_type, source in signals:
        if at not in body["waitpoints"] or not passes(body.get("matcher"), name):
            continue
        token: Any = {
            "DistinctWaitpoints": at,
            "DistinctSignals": number,
            "DistinctSources": [source_type, source],
        }[body["count_kind"]]
        if token not in tally:
            tally.append(token)
    return len(tally) >= int(body["n"])


def grouped(signals: list[Arrival]) -> dict[str, list[SeenSignal]]:
    found: dict[str, list[SeenSignal]] = {}
    for key, number, name, source_type, source in signals:
        found.setdefault(key, []).append(SeenSignal(str(number), name, source_type, source))
    return found


@given(conditions, arrivals)
@settings(max_examples=20_000 if IS_FULL else 3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_condition_holds_exactly_when_the_reference_says_so(condition: Condition, signals: list[Arrival]) -> None:
    """After every arrival; once met it stays met; the document says the same after a trip through JSON."""
    check_condition(condition, KEYS, has_timeout=True)
    document = msgspec.json.decode(msgspec.json.encode(condition_document(condition)))
    again = read_condition(document)
    assert again == condition
    held = False
    for end in range(len(signals) + 1):
        expected = reference_holds(document, signals[:end])
        assert evaluate(condition, grouped(signals[:end])) == expected
        assert evaluate(again, grouped(signals[:end])) == expected
        assert expected or not held, "more signals never unmeet a condition"
        held = expected
    event(f"met: {held}")


@given(conditions, arrivals, st.randoms(use_true_random=False))
@settings(max_examples=5000 if IS_FULL else 500, deadline=None)
def test_the_order_of_arrival_does_not_matter_to_the_result(
    condition: Condition, signals: list[Arrival], rng: Any
) -> None:
    mixed = list(signals)
    rng.shuffle(mixed)
    assert evaluate(condition, grouped(signals)) == evaluate(condition, grouped(mixed))


@given(
    trees,
    arrivals.filter(bool),
    st.integers(0, 14),
    st.booleans(),
)
@settings(
    max_examples=200 if IS_FULL else 30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.timeout(600)
def test_an_execution_resumes_at_the_very_signal_that_meets_its_condition(
    dsn: str, condition: Condition, signals: list[Arrival], ahead: int, is_ahead: bool
) -> None:
    """I5 through the database: some signals ahead of the suspension, the rest after it, repeats among them."""

    async def scenario() -> None:
        sql = await asyncpg.connect(dsn)
        try:
            await sql.execute("truncate ff_exec_core, ff_attempt, ff_suspension_current, ff_waitpoint_pending")
            async with Engine.connect(dsn) as engine:
                await engine.seed_waitpoint_hmac_secret("k1", "ab" * 32)
                await follow(engine, condition, signals, ahead if is_ahead else 0)
        finally:
            await sql.close()

    asyncio.run(scenario())


async def follow(engine: Engine, condition: Condition, signals: list[Arrival], ahead: int) -> None:
    execution_id = (await engine.create_execution()).execution_id
    claim = await engine.claim("default", **WORKER)
    assert claim is not None
    points: dict[str, Any] = {}
    if ahead:
        points = {key: await engine.create_waitpoint(claim.handle, key, expires_in_ms=10**6) for key in KEYS}
    counted: list[Arrival] = []

    async def deliver(arrival: Arrival) -> SignalEffect | None:
        key, number, name, source_type, source = arrival
        # An id stands for one signal at one waitpoint, as a sender that repeats itself would use it.
        signal_id = f"00000000-0000-4000-8000-{KEYS.index(key)}{number:011d}"
        answer = await engine.deliver_signal(
            Signal(
                execution_id,
                points[key].waitpoint_id,
                name,
                points[key].token,
                source_type=source_type,
                source_identity=source,
                signal_id=signal_id,
            )
        )
        is_repeat = any(one[:2] == arrival[:2] for one in counted)
        assert isinstance(answer, Duplicate) == is_repeat
        if isinstance(answer, Accepted):
            counted.append(arrival)
            return answer.effect
        return None

    def holds() -> bool:
        unique = [(key, KEYS.index(key) * 100 + number, *rest) for key, number, *rest in counted]
        return reference_holds(condition_document(condition), unique)  # type: ignore[arg-type]

    for arrival in signals[:ahead]:
        assert await deliver(arrival) in (None, SignalEffect.BUFFERED_FOR_PENDING_WAITPOINT)
    waitpoints: list[Fresh | UsePending] = [
        UsePending(points[key].waitpoint_id) if points else Fresh(key) for key in KEYS
    ]
    outcome = await engine.suspend(claim.handle, Suspend(waitpoints, condition))
    assert isinstance(outcome, SuspensionAlreadySatisfied if holds() else Suspended)
    points = {point.key: point for point in outcome.waitpoints}
    is_met = holds()
    for arrival in signals[ahead:]:
        if is_met:
            is_repeat = any(one[:2] == arrival[:2] for one in counted)
            if is_repeat:
                assert await deliver(arrival) is None
                continue
            with pytest.raises(State) as late:
                await deliver(arrival)
            assert late.value.kind == StateKind.WAITPOINT_CLOSED
            continue
        effect = await deliver(arrival)
        is_met = holds()
        if effect is not None:
            expected = SignalEffect.RESUME_CONDITION_SATISFIED if is_met else SignalEffect.APPENDED_TO_WAITPOINT
            assert effect == expected
    seen = await engine.observe_signals(outcome.handle)
    assert [(one.signal_name, one.source_type, one.source_identity) for one in seen] == [one[2:] for one in counted]
    snapshot = await engine.describe_execution(execution_id)
    assert snapshot is not None
    is_running = isinstance(outcome, SuspensionAlreadySatisfied)
    assert snapshot.public_state == ("running" if is_running else "resumable" if is_met else "suspended")
