"""Conditions: what holds, what is refused before anything is written, and FlowFabric's JSON in both directions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ffd import (
    AllOf,
    ByName,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    Validation,
    ValidationKind,
    Wildcard,
    all_of_waitpoints,
)
from ffd.core.conditions import (
    COUNT_MAX,
    MEMBERS_MAX,
    Condition,
    SeenSignal,
    check_condition,
    condition_document,
    evaluate,
    read_condition,
    required_signal_names,
)

KEYS = ("a", "b", "c")
SIGNALS, SOURCES, WAITPOINTS = CountKind.DISTINCT_SIGNALS, CountKind.DISTINCT_SOURCES, CountKind.DISTINCT_WAITPOINTS


def seen(name: str, id: str = "1", source: tuple[str, str] = ("t", "i")) -> SeenSignal:
    return SeenSignal(id, name, *source)


def nested(depth: int) -> Condition:
    condition: Condition = Single("a")
    for _ in range(depth - 1):
        condition = AllOf((condition,))
    return condition


# What holds


def test_a_single_holds_for_a_signal_of_its_name_at_its_waitpoint() -> None:
    """C-306, C-307: exact and case-sensitive."""
    condition = Single("a", ByName("approve"))
    assert evaluate(condition, {"a": [seen("other"), seen("approve")]})
    assert not evaluate(condition, {})
    for key, signals in (("a", []), ("a", [seen("Approve")]), ("a", [seen("approve ")]), ("b", [seen("approve")])):
        assert not evaluate(condition, {key: signals})


def test_a_wildcard_holds_for_any_name() -> None:
    for condition in (Single("a"), Single("a", Wildcard())):
        assert evaluate(condition, {"a": [seen("")]})
        assert not evaluate(condition, {"b": [seen("x")]})


def test_all_of_needs_every_member() -> None:
    """C-309, C-120."""
    condition = all_of_waitpoints(["a", "b"])
    assert condition == AllOf((Single("a", Wildcard()), Single("b", Wildcard())))
    assert not evaluate(condition, {"a": [seen("x"), seen("y")]})
    assert evaluate(condition, {"a": [seen("x")], "b": [seen("y")]})


def test_all_of_two_matchers_at_one_waitpoint_needs_both_names() -> None:
    """V-027."""
    condition = AllOf((Single("a", ByName("build")), Single("a", ByName("test"))))
    assert not evaluate(condition, {"a": [seen("build", "1"), seen("build", "2")]})
    assert evaluate(condition, {"a": [seen("build", "1"), seen("test", "2")]})


def test_all_of_nothing_never_holds() -> None:
    assert not evaluate(AllOf(()), {"a": [seen("x")]})


def test_a_count_by_sources_takes_each_pair_of_type_and_identity_once() -> None:
    """C-308, C-119."""
    condition = Count(2, SOURCES, ("a",))
    assert not evaluate(condition, {"a": [seen("x", "1"), seen("x", "2")]})
    assert evaluate(condition, {"a": [seen("x", "1"), seen("x", "2", ("t", "j"))]})
    assert evaluate(condition, {"a": [seen("x", "1"), seen("x", "2", ("u", "i"))]})


def test_a_count_by_waitpoints_takes_each_waitpoint_once() -> None:
    """V-029."""
    condition = Count(2, WAITPOINTS, KEYS)
    assert not evaluate(condition, {"a": [seen("x", "1"), seen("x", "2")]})
    assert evaluate(condition, {"a": [seen("x", "1")], "c": [seen("x", "2")]})


def test_a_count_by_signals_takes_each_signal_id_once() -> None:
    """V-030."""
    condition = Count(2, SIGNALS, ("a", "b"))
    assert not evaluate(condition, {"a": [seen("x", "1"), seen("x", "1")], "b": [seen("y", "1")]})
    assert evaluate(condition, {"a": [seen("x", "1")], "b": [seen("x", "2")]})


def test_a_count_ignores_other_waitpoints_and_what_its_matcher_refuses() -> None:
    """V-031."""
    condition = Count(2, SIGNALS, ("a",), ByName("yes"))
    signals = {"a": [seen("yes", "1"), seen("no", "2")], "b": [seen("yes", "3")]}
    assert not evaluate(condition, signals)
    assert evaluate(condition, {"a": [*signals["a"], seen("yes", "4")]})


def test_any_of_is_a_count_of_one() -> None:
    assert evaluate(Count(1, WAITPOINTS, KEYS), {"b": [seen("x")]})


def test_two_counts_in_one_tree_do_not_share_their_tally() -> None:
    """Reference §4.6: the caveat of the other backend does not apply."""
    condition = AllOf((Count(1, SIGNALS, ("a", "b")), Count(2, SIGNALS, ("a", "b"))))
    assert not evaluate(condition, {"a": [seen("x", "1")]})
    assert evaluate(condition, {"a": [seen("x", "1")], "b": [seen("x", "2")]})


@pytest.mark.parametrize("condition", [OperatorOnly(), TimeoutOnly()])
def test_no_signal_meets_a_condition_without_signals(condition: Condition) -> None:
    assert not evaluate(condition, {key: [seen("timeout"), seen("resume")] for key in (*KEYS, "__timeout__", "")})


# What is refused

BAD: dict[str, tuple[Any, str]] = {
    "not a condition": ("Single", "condition"),
    "nothing": (None, "condition"),
    "an unknown key": (Single("z"), "condition.key"),
    "a key that is no text": (Single(5), "condition.key"),  # type: ignore[arg-type]
    "an unhashable key": (Single(["a"]), "condition.key"),  # type: ignore[arg-type]
    "a matcher that is none": (Single("a", "go"), "condition.matcher"),  # type: ignore[arg-type]
    "an empty name": (Single("a", ByName("")), "condition.matcher.name"),
    "a name with NUL": (Single("a", ByName("a\0")), "condition.matcher.name"),
    "a name too long": (Single("a", ByName("n" * 257)), "condition.matcher.name"),
    "a name that is no text": (Single("a", ByName(5)), "condition.matcher.name"),  # type: ignore[arg-type]
    "AllOf of nothing": (AllOf(()), "condition.members"),
    "AllOf of no sequence": (AllOf(5), "condition.members"),  # type: ignore[arg-type]
    "AllOf of too many": (AllOf((Single("a"),) * (MEMBERS_MAX + 1)), "condition.members"),
    "a bad member": (AllOf((Single("a"), Single("z"))), "condition.members[1].key"),
    "a bad member's member": (AllOf((AllOf((Count(0, SIGNALS, ("a",)),)),)), "condition.members[0].members[0].n"),
    "an operator inside": (AllOf((Single("a"), OperatorOnly())), "condition.members[1]"),
    "a timeout inside": (AllOf((TimeoutOnly(),)), "condition.members[0]"),
    "n = 0": (Count(0, SIGNALS, ("a",)), "condition.n"),
    "n < 0": (Count(-1, SIGNALS, ("a",)), "condition.n"),
    "n too large": (Count(COUNT_MAX + 1, SIGNALS, ("a",)), "condition.n"),
    "n = True": (Count(True, SIGNALS, ("a",)), "condition.n"),
    "n is no integer": (Count(1.0, SIGNALS, ("a",)), "condition.n"),  # type: ignore[arg-type]
    "n beyond the set": (Count(4, WAITPOINTS, KEYS), "condition.n"),
    "an unknown kind": (Count(1, "distinct_people", ("a",)), "condition.kind"),  # type: ignore[arg-type]
    "an unhashable kind": (Count(1, ["x"], ("a",)), "condition.kind"),  # type: ignore[arg-type]
    "no waitpoints": (Count(1, SIGNALS, ()), "condition.waitpoints"),
    "waitpoints that are text": (Count(1, SIGNALS, "a"), "condition.waitpoints"),  # type: ignore[arg-type]
    "an unknown waitpoint": (Count(1, SIGNALS, ("a", "z")), "condition.waitpoints[1]"),
    "a waitpoint twice": (Count(1, SIGNALS, ("a", "a")), "condition.waitpoints"),
    "a count's bad matcher": (Count(1, SIGNALS, ("a",), "go"), "condition.matcher"),  # type: ignore[arg-type]
    "depth 5": (nested(5), "condition.members[0].members[0].members[0].members[0]"),
    "depth 500": (nested(500), "condition.members[0].members[0].members[0].members[0]"),
    "TimeoutOnly without one": (TimeoutOnly(), "timeout_at_ms"),
}


@pytest.mark.parametrize(("condition", "field"), BAD.values(), ids=BAD.keys())
def test_a_bad_condition_is_refused_by_the_field_that_is_wrong(condition: Any, field: str) -> None:
    """V-024, V-025, V-032, V-033; reference §4.4.2."""
    with pytest.raises(Validation) as refused:
        check_condition(condition, KEYS, has_timeout=False)
    assert (refused.value.kind, refused.value.field) == (ValidationKind.INVALID_INPUT, field)


@pytest.mark.parametrize(
    "condition",
    [
        Single("a"),
        Single("b", ByName("n" * 256)),
        all_of_waitpoints(KEYS),
        Count(3, WAITPOINTS, KEYS),
        Count(COUNT_MAX, SIGNALS, ("a",)),
        Count(1, SOURCES, ["a", "b"], Wildcard()),  # type: ignore[arg-type]
        Count(1, "distinct_sources", ("a",)),  # type: ignore[arg-type]
        AllOf((Single("a"),) * MEMBERS_MAX),
        nested(4),
        OperatorOnly(),
    ],
    ids=str,
)
def test_a_sound_condition_is_taken(condition: Condition) -> None:
    """V-032: depth 4 is allowed."""
    check_condition(condition, KEYS, has_timeout=False)


def test_timeout_only_is_taken_with_a_timeout() -> None:
    check_condition(TimeoutOnly(), (), has_timeout=True)


# JSON

DOCUMENTS: list[tuple[Condition, str]] = [
    (Single("k", ByName("approve")), '{"Single":{"waitpoint_key":"k","matcher":{"ByName":"approve"}}}'),
    (Single("k", Wildcard()), '{"Single":{"waitpoint_key":"k","matcher":"Wildcard"}}'),
    (OperatorOnly(), '"OperatorOnly"'),
    (TimeoutOnly(), '"TimeoutOnly"'),
    (
        AllOf((Single("a"), Single("b", ByName("x")))),
        '{"Composite":{"kind":"AllOf","members":[{"Single":{"waitpoint_key":"a","matcher":"Wildcard"}},'
        '{"Single":{"waitpoint_key":"b","matcher":{"ByName":"x"}}}]}}',
    ),
    (
        Count(2, SOURCES, ("a", "b")),
        '{"Composite":{"kind":"Count","n":2,"count_kind":"DistinctSources","waitpoints":["a","b"]}}',
    ),
    (
        Count(2, SOURCES, ("a",), ByName("approve")),
        '{"Composite":{"kind":"Count","n":2,"count_kind":"DistinctSources","matcher":{"ByName":"approve"},'
        '"waitpoints":["a"]}}',
    ),
    (
        Count(1, SIGNALS, ("a",), Wildcard()),
        '{"Composite":{"kind":"Count","n":1,"count_kind":"DistinctSignals","matcher":"Wildcard","waitpoints":["a"]}}',
    ),
    (
        AllOf((Count(1, WAITPOINTS, ("a",)), AllOf((Single("b"),)))),
        '{"Composite":{"kind":"AllOf","members":[{"Composite":{"kind":"Count","n":1,'
        '"count_kind":"DistinctWaitpoints","waitpoints":["a"]}},{"Composite":{"kind":"AllOf","members":['
        '{"Single":{"waitpoint_key":"b","matcher":"Wildcard"}}]}}]}}',
    ),
]


@pytest.mark.parametrize(("condition", "document"), DOCUMENTS, ids=[str(at) for at in range(len(DOCUMENTS))])
def test_the_documents_of_the_reference_are_written_and_read_exactly(condition: Condition, document: str) -> None:
    """Reference §2.11."""
    assert msgspec.json.encode(condition_document(condition)).decode() == document
    assert read_condition(msgspec.json.decode(document)) == condition


@pytest.mark.parametrize("matcher", ["null", "absent"])
def test_a_count_without_a_matcher_is_read_from_null_too(matcher: str) -> None:
    document: dict[str, Any] = {"kind": "Count", "n": 2, "count_kind": "DistinctSignals", "waitpoints": ["a"]}
    if matcher == "null":
        document["matcher"] = None
    assert read_condition({"Composite": document}) == Count(2, SIGNALS, ("a",))


def test_a_kind_given_as_text_is_stored_like_the_constant() -> None:
    assert condition_document(Count(1, "distinct_sources", ("a",))) == condition_document(  # type: ignore[arg-type]
        Count(1, SOURCES, ("a",))
    )


@pytest.mark.parametrize(
    "document",
    [
        None,
        5,
        [],
        {},
        "AnyOf",
        {"Single": {}},
        {"Single": None},
        {"Single": {"waitpoint_key": "a", "matcher": {"ByRegex": "x"}}},
        {"Single": {"waitpoint_key": "a", "matcher": {"ByName": 5}}},
        {"Composite": {"kind": "AnyOf", "members": []}},
        {"Composite": {"kind": "Count", "n": "x", "count_kind": "DistinctSignals", "waitpoints": ["a"]}},
        {"Composite": {"kind": "Count", "n": 1, "count_kind": "DistinctPeople", "waitpoints": ["a"]}},
        {"Composite": {"kind": "Count", "n": 1, "count_kind": [], "waitpoints": ["a"]}},
        {"Composite": {"kind": "AllOf", "members": [{"Unknown": 1}]}},
        condition_document(nested(5)),
    ],
    ids=str,
)
def test_a_document_that_cannot_be_understood_never_holds(document: object) -> None:
    """Reference §4.6: unknown variants evaluate false."""
    assert not evaluate(read_condition(document), {"a": [seen("x")]})


# Listings


@pytest.mark.parametrize(
    ("condition", "key", "names"),
    [
        (Single("a", ByName("go")), "a", ["go"]),
        (Single("a", ByName("go")), "b", []),
        (Single("a"), "a", []),
        (AllOf((Single("a", ByName("x")), Single("b", ByName("y")))), "b", ["y"]),
        (
            AllOf((Single("a", ByName("y")), AllOf((Single("a", ByName("x")), Single("a", ByName("x")))))),
            "a",
            ["x", "y"],
        ),
        (Count(1, SIGNALS, ("a", "b"), ByName("z")), "b", ["z"]),
        (Count(1, SIGNALS, ("a", "b")), "b", []),
        (OperatorOnly(), "a", ["__operator_only__"]),
        (TimeoutOnly(), "a", ["__timeout_only__"]),
    ],
)
def test_required_names_are_the_names_that_target_a_waitpoint(condition: Condition, key: str, names: list[str]) -> None:
    """C-002…C-005."""
    assert required_signal_names(condition, key) == names
