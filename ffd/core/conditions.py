"""When a suspended execution may go on: conditions over the signals that arrived.

Stored as FlowFabric's JSON, in both directions. Evaluation is pure and starts from scratch each time, so that two
counts in one tree never share a tally.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from ffd.core.checks import check_text
from ffd.core.errors import Validation, ValidationKind

DEPTH_MAX: Final = 4
MEMBERS_MAX: Final = 256
COUNT_MAX: Final = 1_000_000

OPERATOR_ONLY_SENTINEL: Final = "__operator_only__"
TIMEOUT_ONLY_SENTINEL: Final = "__timeout_only__"


class ByName(msgspec.Struct, frozen=True):
    """Matches signals of exactly this name."""

    name: str


class Wildcard(msgspec.Struct, frozen=True):
    """Matches every signal."""


Matcher = ByName | Wildcard


class CountKind(StrEnum):
    """What is counted once."""

    DISTINCT_WAITPOINTS = "distinct_waitpoints"
    DISTINCT_SIGNALS = "distinct_signals"
    DISTINCT_SOURCES = "distinct_sources"


class Single(msgspec.Struct, frozen=True):
    """A signal at one waitpoint that matches."""

    key: str
    matcher: Matcher = Wildcard()


class AllOf(msgspec.Struct, frozen=True):
    """Every member holds."""

    members: tuple[Condition, ...]


class Count(msgspec.Struct, frozen=True):
    """At least `n` distinct waitpoints, signals or sources among the matching signals at these waitpoints."""

    n: int
    kind: CountKind
    waitpoints: tuple[str, ...]
    matcher: Matcher | None = None


class OperatorOnly(msgspec.Struct, frozen=True):
    """No signal resumes it; an operator does."""


class TimeoutOnly(msgspec.Struct, frozen=True):
    """No signal resumes it; its timeout does."""


Condition = Single | AllOf | Count | OperatorOnly | TimeoutOnly


def all_of_waitpoints(keys: Sequence[str]) -> AllOf:
    """Any signal at each of these waitpoints."""
    return AllOf(tuple(Single(key) for key in keys))


class SeenSignal(msgspec.Struct, frozen=True):
    """What a condition looks at of a stored signal."""

    signal_id: str = ""
    signal_name: str = ""
    source_type: str = ""
    source_identity: str = ""


def _bad(detail: str, path: str) -> Validation:
    return Validation(ValidationKind.INVALID_INPUT, detail, path)


def _check_matcher(matcher: object, path: str) -> None:
    match matcher:
        case ByName(name):
            check_text(name, f"{path}.name")
        case Wildcard():
            pass
        case _:
            raise _bad("expected ByName or Wildcard", path)


def check_condition(condition: object, keys: Collection[str], *, has_timeout: bool) -> None:
    """Refuse a condition that is malformed, could never hold, or names a waitpoint that is not there."""
    _check(condition, keys, "condition", 1)
    if isinstance(condition, TimeoutOnly) and not has_timeout:
        raise _bad("TimeoutOnly needs timeout_at_ms", "timeout_at_ms")


def _check(condition: object, keys: Collection[str], path: str, depth: int) -> None:
    if depth > DEPTH_MAX:
        raise _bad(f"nested deeper than {DEPTH_MAX}", path)
    match condition:
        case Single(key, matcher):
            _check_key(key, keys, f"{path}.key")
            _check_matcher(matcher, f"{path}.matcher")
        case AllOf(members):
            if not isinstance(members, tuple | list) or not 1 <= len(members) <= MEMBERS_MAX:
                raise _bad(f"expected 1..{MEMBERS_MAX} members", f"{path}.members")
            for at, member in enumerate(members):
                if isinstance(member, OperatorOnly | TimeoutOnly):
                    raise _bad("can only stand alone: as a member it would never hold", f"{path}.members[{at}]")
                _check(member, keys, f"{path}.members[{at}]", depth + 1)
        case Count(n, kind, waitpoints, matcher):
            _check_count(n, kind, waitpoints, keys, path)
            if matcher is not None:
                _check_matcher(matcher, f"{path}.matcher")
        case OperatorOnly() | TimeoutOnly():
            pass
        case _:
            raise _bad("expected Single, AllOf, Count, OperatorOnly or TimeoutOnly", path)


def _check_key(key: object, keys: Collection[str], path: str) -> None:
    if not isinstance(key, str) or key not in keys:
        raise _bad("names no waitpoint of this suspension", path)


def _check_count(n: object, kind: object, waitpoints: object, keys: Collection[str], path: str) -> None:
    if type(n) is not int or not 1 <= n <= COUNT_MAX:
        raise _bad(f"expected an integer in 1..{COUNT_MAX}", f"{path}.n")
    if kind not in tuple(CountKind):
        raise _bad(f"expected one of {', '.join(CountKind)}", f"{path}.kind")
    if not isinstance(waitpoints, tuple | list) or not waitpoints:
        raise _bad("expected at least one waitpoint key", f"{path}.waitpoints")
    for at, key in enumerate(waitpoints):
        _check_key(key, keys, f"{path}.waitpoints[{at}]")
    if len(set(waitpoints)) != len(waitpoints):
        raise _bad("a key stands twice", f"{path}.waitpoints")
    if kind == CountKind.DISTINCT_WAITPOINTS and n > len(waitpoints):
        raise _bad(f"{n} of {len(waitpoints)} waitpoints can never be reached", f"{path}.n")


def _matches(matcher: Matcher | None, signal: SeenSignal) -> bool:
    return not isinstance(matcher, ByName) or signal.signal_name == matcher.name


def evaluate(condition: Condition, signals: Mapping[str, Sequence[SeenSignal]]) -> bool:
    """Whether the condition holds for the signals at each waitpoint key."""
    match condition:
        case Single(key, matcher):
            return any(_matches(matcher, signal) for signal in signals.get(key, ()))
        case AllOf(members):
            return bool(members) and all(evaluate(member, signals) for member in members)
        case Count(n, kind, waitpoints, matcher):
            distinct = {
                _counted(kind, key, signal)
                for key in waitpoints
                for signal in signals.get(key, ())
                if _matches(matcher, signal)
            }
            return len(distinct) >= n
        case _:
            return False


def _counted(kind: CountKind, key: str, signal: SeenSignal) -> object:
    match kind:
        case CountKind.DISTINCT_WAITPOINTS:
            return key
        case CountKind.DISTINCT_SIGNALS:
            return signal.signal_id
        case _:
            return (signal.source_type, signal.source_identity)


def required_signal_names(condition: Condition, key: str) -> list[str]:
    """The names that signals at `key` should have; empty means any. Shown in listings, decides nothing."""
    match condition:
        case OperatorOnly():
            return [OPERATOR_ONLY_SENTINEL]
        case TimeoutOnly():
            return [TIMEOUT_ONLY_SENTINEL]
        case _:
            return sorted(set(_names_at(condition, key)))


def _names_at(condition: Condition, key: str) -> Iterator[str]:
    match condition:
        case Single(single_key, ByName(name)) if single_key == key:
            yield name
        case Count(_, _, waitpoints, ByName(name)) if key in waitpoints:
            yield name
        case AllOf(members):
            for member in members:
                yield from _names_at(member, key)


# FlowFabric's JSON

_KIND_NAMES: Final = {
    CountKind.DISTINCT_WAITPOINTS: "DistinctWaitpoints",
    CountKind.DISTINCT_SIGNALS: "DistinctSignals",
    CountKind.DISTINCT_SOURCES: "DistinctSources",
}
_KINDS_BY_NAME: Final = {name: kind for kind, name in _KIND_NAMES.items()}


def _matcher_document(matcher: Matcher) -> Any:
    return {"ByName": matcher.name} if isinstance(matcher, ByName) else "Wildcard"


def condition_document(condition: Condition) -> Any:
    """The condition as FlowFabric stores it."""
    match condition:
        case Single(key, matcher):
            return {"Single": {"waitpoint_key": key, "matcher": _matcher_document(matcher)}}
        case AllOf(members):
            return {"Composite": {"kind": "AllOf", "members": [condition_document(member) for member in members]}}
        case Count(n, kind, waitpoints, matcher):
            document: dict[str, Any] = {"kind": "Count", "n": n, "count_kind": _KIND_NAMES[CountKind(kind)]}
            if matcher is not None:
                document["matcher"] = _matcher_document(matcher)
            return {"Composite": {**document, "waitpoints": list(waitpoints)}}
        case OperatorOnly():
            return "OperatorOnly"
        case TimeoutOnly():
            return "TimeoutOnly"


def read_condition(document: object) -> Condition:
    """The condition in a stored document. One that cannot be understood never holds: only an operator resumes it."""
    try:
        return _read(document, 1)
    except (KeyError, TypeError, ValueError, AttributeError):
        return OperatorOnly()


def _read_matcher(document: object) -> Matcher:
    if document == "Wildcard":
        return Wildcard()
    if isinstance(document, dict) and isinstance(document["ByName"], str):
        return ByName(document["ByName"])
    raise ValueError("unknown matcher")


def _read(document: Any, depth: int) -> Condition:
    if depth > DEPTH_MAX:
        raise ValueError("too deep")
    if document == "OperatorOnly":
        return OperatorOnly()
    if document == "TimeoutOnly":
        return TimeoutOnly()
    if "Single" in document:
        single = document["Single"]
        return Single(str(single["waitpoint_key"]), _read_matcher(single["matcher"]))
    composite = document["Composite"]
    if composite["kind"] == "AllOf":
        return AllOf(tuple(_read(member, depth + 1) for member in composite["members"]))
    if composite["kind"] != "Count":
        raise ValueError("unknown composite")
    matcher = composite.get("matcher")
    return Count(
        int(composite["n"]),
        _KINDS_BY_NAME[composite["count_kind"]],
        tuple(str(key) for key in composite["waitpoints"]),
        None if matcher is None else _read_matcher(matcher),
    )
