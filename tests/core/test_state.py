"""The state vector and how stored rows read."""

from __future__ import annotations

import pytest

from ffd import PublicState
from ffd.core.state import ROWS, expand_rows, read_public_state


def test_every_row_reads_as_its_own_public_state() -> None:
    for name, row in ROWS.items():
        read = read_public_state(row.lifecycle_phase, row.eligibility_state, row.public_state, None)
        assert read == row.public_state, name


@pytest.mark.parametrize(
    ("phase", "eligibility", "public", "outcome", "expected"),
    [
        ("active", "not_applicable", "active", None, PublicState.RUNNING),  # C-094: stored `running` or `active`
        ("active", "not_applicable", "waiting", None, PublicState.RUNNING),
        ("terminal", "not_applicable", "running", "success", PublicState.COMPLETED),
        ("terminal", "not_applicable", "running", "failure", PublicState.FAILED),
        ("terminal", "not_applicable", "suspended", None, PublicState.FAILED),
        ("cancelled", "cancelled", "cancelled", None, PublicState.CANCELLED),  # C-102
        ("submitted", "eligible_now", "waiting", None, PublicState.WAITING),
        ("runnable", "pending_claim", "waiting", None, PublicState.WAITING),  # C-103
        ("runnable", "eligible_now", "running", None, PublicState.WAITING),
        ("runnable", "not_eligible_until_time", "running", None, PublicState.DELAYED),
        ("runnable", "blocked_by_dependencies", "waiting", None, PublicState.WAITING_CHILDREN),
        ("runnable", "eligible_now", "resumable", None, PublicState.RESUMABLE),
    ],
)
def test_the_references_literals_are_normalised(
    phase: str, eligibility: str, public: str, outcome: str | None, expected: PublicState
) -> None:
    assert read_public_state(phase, eligibility, public, outcome) == expected


def test_a_named_row_expands_to_all_its_columns() -> None:
    sql = expand_rows("set [[completed]]")
    assert sql == (
        "set lifecycle_phase = 'terminal', ownership_state = 'unowned', eligibility_state = 'not_applicable',"
        " public_state = 'completed', attempt_state = 'attempt_terminal', blocking_reason = null"
    )


def test_a_choice_between_rows_is_a_case_only_where_they_differ() -> None:
    sql = expand_rows("[[by d.r: failed, expired]]")
    assert "lifecycle_phase = 'terminal'" in sql
    assert "public_state = case d.r when 'failed' then 'failed' when 'expired' then 'expired' end" in sql


def test_an_unknown_row_is_a_programming_error() -> None:
    with pytest.raises(KeyError):
        expand_rows("set [[nonsense]]")


def test_states_know_whether_they_are_final() -> None:
    final = {state for state in PublicState if state.is_terminal}
    assert final == {"completed", "failed", "expired", "skipped", "cancelled"}
    assert str(PublicState.WAITING_CHILDREN) == "waiting_children"
