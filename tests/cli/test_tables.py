"""Tables, times and graphs as text."""

from __future__ import annotations

from typing import Any

import pytest

from ffd import EdgeSnapshot, ExecutionSnapshot, PublicState
from ffd.cli.graph import SYMBOLS, arrange, draw
from ffd.cli.tables import Column, cut, facts, table, text_width
from ffd.cli.times import ago, duration, iso, moment, parse_duration

COLUMNS = (Column("ID", is_id=True), Column("NAME"), Column("NOTE"))
ROW = ("{fp:12}:01900000-0000-7000-8000-0123456789ab", "n" * 30, "a note")


def test_into_a_pipe_nothing_is_cut() -> None:
    title, row = table(COLUMNS, [ROW], None)
    assert row.split("  ") == list(ROW)
    assert title.startswith("ID ")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_on_a_terminal_other_cells_are_cut_before_ids(width: int) -> None:
    lines = table(COLUMNS, [ROW, ("short", "b", "c" * 200)], width)
    assert max(map(text_width, lines)) <= width
    assert ROW[0] in lines[1]
    assert "…" in lines[2]


def test_on_a_narrow_terminal_an_id_keeps_its_end() -> None:
    _, row = table(COLUMNS, [ROW], 40)
    assert text_width(row) <= 40
    assert row.startswith("…")
    assert row.split()[0].endswith("0123456789ab")


def test_columns_that_can_be_spared_go_before_anything_is_cut_short() -> None:
    columns = (Column("ID", is_id=True), Column("STATE", is_whole=True), Column("A", spare=1), Column("B", spare=2))
    row = (ROW[0], "waiting_children", "aaaaaaaa", "bbbbbbbb")
    titles = [table(columns, [row], width)[0].split() for width in (78, 77, 69, 40)]
    assert titles == [["ID", "STATE", "A", "B"], ["ID", "STATE", "A"], ["ID", "STATE"], ["ID", "STATE"]]
    assert "waiting_children" in table(columns, [row], 40)[1]


def test_wide_characters_take_two_places_and_escapes_cannot_break_a_row() -> None:
    assert text_width("日本") == 4
    assert cut("日本語", 5) == "日本…"
    assert cut("abcdef", 4) == "abc…"
    assert cut("abcdef", 4, keep_end=True) == "…def"
    lines = table((Column("A"), Column("B")), [("日本", "x"), ("a\nb", "y")], None)
    assert lines == ["A     B", "日本  x", r"a\nb  y"]


def test_facts_show_a_dash_for_nothing() -> None:
    assert facts([("a", ""), ("bcd", "1\x1b")]) == ["a    -", r"bcd  1\x1b"]


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("500ms", 500),
        ("30s", 30_000),
        ("5m", 300_000),
        ("2h", 7_200_000),
        ("1d", 86_400_000),
        ("1h30m", 5_400_000),
        ("0s", 0),
        ("5", None),
        ("", None),
        ("1.5h", None),
        ("-1s", None),
        ("1 s", None),
        ("1w", None),
        ("٣s", None),
        ("9" * 16 + "s", None),
    ],
)
def test_durations_have_units(text: str, ms: int | None) -> None:
    assert parse_duration(text) == ms


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (999, "999ms"),
        (59_999, "59s"),
        (3_599_999, "59m"),
        (7_500_000, "2h 5m"),
        (7_200_000, "2h"),
        (90_000_000, "1d 1h"),
        (86_400_000, "1d"),
    ],
)
def test_durations_are_told_in_their_largest_units(ms: int, text: str) -> None:
    assert duration(ms) == text


def test_moments_are_told_both_ways() -> None:
    now = 1_714_564_800_000
    assert moment(now - 180_000, now) == "2024-05-01T11:57:00Z (3m ago)"
    assert ago(now + 20_000, now) == "in 20s"
    assert ago(now - 999, now) == "now"
    assert iso(2**53 - 1) == f"{2**53 - 1} ms"


# Graphs


def node(name: str, state: PublicState = PublicState.WAITING) -> ExecutionSnapshot:
    fields: dict[str, Any] = dict.fromkeys(ExecutionSnapshot.__struct_fields__)
    return ExecutionSnapshot(**{**fields, "execution_id": name, "public_state": state, "kind": f"kind-{name}"})


def edge(upstream: str, downstream: str, resolution: str | None = None, *, is_applied: bool = True) -> EdgeSnapshot:
    return EdgeSnapshot(f"{upstream}-{downstream}", upstream, downstream, is_applied, resolution, 0)


def test_a_node_stands_below_everything_it_waits_for() -> None:
    edges = [edge("a", "b"), edge("b", "c"), edge("a", "c"), edge("c", "d"), edge("x", "d"), edge("gone", "b")]
    nodes = arrange([node(name) for name in "dcbax"], edges)
    assert [(each.execution.execution_id, each.layer) for each in nodes] == [
        ("a", 0),
        ("x", 0),
        ("b", 1),
        ("c", 2),
        ("d", 3),
    ]


def test_a_cycle_in_what_is_stored_does_not_hang_the_drawing() -> None:
    nodes = arrange([node(name) for name in "abc"], [edge("b", "c"), edge("c", "b")])
    assert [each.execution.execution_id for each in nodes] == ["a", "b", "c"]
    assert len(draw(nodes, 10, 80)) == 5


def test_many_upstreams_are_counted_and_not_spelled() -> None:
    names = [f"u{at:02}" for at in range(20)]
    nodes = arrange([node(name) for name in (*names, "z")], [edge(name, "z", "satisfied") for name in names])
    assert draw(nodes, 100, None)[-1].endswith("1✓, 2✓, 3✓, 4✓, 5✓, 6✓, 7✓, 8✓ and 12 more")


@pytest.mark.parametrize("state", list(PublicState))
def test_every_state_has_a_symbol_of_one_place(state: PublicState) -> None:
    assert text_width(SYMBOLS[state]) == 1
    assert f"{SYMBOLS[state]} {state}" in draw(arrange([node("a", state)], []), 1, None)[1]
