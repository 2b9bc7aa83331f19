"""Explanations in sentences, one for every state and everything it may wait for."""

from __future__ import annotations

from typing import Any

import pytest

from ffd import Explanation, PublicState
from ffd.cli.explain_text import paragraph

ID = "{fp:1}:01900000-0000-7000-8000-000000000000"
NOW = 1_714_564_800_000
MINUTE = 60_000

CASES: list[tuple[str, str, dict[str, Any], list[str]]] = [
    (
        "waiting",
        "worker",
        {"lane": "mail", "required_capabilities": ["gpu"], "priority": 3, "ahead": 0, "is_ahead_capped": False},
        ["is ready to run", "for 5m (since 2024-05-01T11:55:00Z)", "lane mail, with the capabilities gpu", "Nothing"],
    ),
    (
        "waiting",
        "worker",
        {"lane": "mail", "ahead": 1, "priority": 3},
        ["1 with the same needs is ahead", "priority is 3"],
    ),
    (
        "resumable",
        "worker",
        {"lane": "m", "ahead": 1000, "is_ahead_capped": True, "priority": 0},
        ["could go on", "1000 or more", "are"],
    ),
    ("delayed", "delay", {"due_at_ms": NOW + MINUTE}, ["was put off 5m ago", "due at 2024-05-01T12:01:00Z (in 1m)"]),
    ("delayed", "delay", {"due_at_ms": NOW - MINUTE}, ["It was due at", "(1m ago)", "the daemon is down or late"]),
    (
        "delayed",
        "retry_backoff",
        {"due_at_ms": NOW + MINUTE, "failure_message": "disk\x1bfull"},
        ["waits for its backoff", r"The last failure was: 'disk\x1bfull'"],
    ),
    ("delayed", "resume_delay", {"due_at_ms": None}, ["was resumed with a delay"]),
    (
        "waiting_children",
        "dependencies",
        {"flow_id": "f", "open_edges": 2},
        ["2 edges into it are open", "ffd flow show f"],
    ),
    ("waiting_children", "dependencies", {"flow_id": "f", "open_edges": 1}, ["1 edge into it is open"]),
    ("waiting_children", "dependencies", {"flow_id": None, "open_edges": 0}, ["the daemon will release it"]),
    (
        "running",
        "owner",
        {
            "worker_id": "w",
            "worker_instance_id": "w-1",
            "lease_expires_at_ms": NOW + 20_000,
            "progress_percent": 40,
            "progress_message": "halfway",
        },
        ["worker w (instance w-1)", "(in 20s)", "40 % ('halfway')", f"ffd execution revoke '{ID}'"],
    ),
    ("running", "owner", {"worker_id": None}, ["worker unknown", "reported no progress"]),
    (
        "running",
        "lease_expiry",
        {"worker_id": "w", "lease_expires_at_ms": NOW - MINUTE},
        ["run out", "(1m ago)", "no more harm"],
    ),
    ("running", "lease_expiry", {"worker_id": "w", "lease_expires_at_ms": None}, ["has no lease"]),
    (
        "suspended",
        "signal",
        {"reason": "waiting_for_approval", "timeout_at_ms": NOW + MINUTE},
        ["for signals, reason waiting_for_approval", "timeout comes at", f"ffd waitpoint list '{ID}'"],
    ),
    ("suspended", "signal", {"reason": None, "timeout_at_ms": NOW - MINUTE}, ["was not acted on"]),
    (
        "suspended",
        "operator",
        {"reason": "manual_pause", "timeout_at_ms": None},
        ["for an operator", "no timeout", "resume"],
    ),
    (
        "completed",
        "nothing",
        {"terminal_at_ms": NOW - MINUTE, "retry_count": 1, "result_size": 5},
        ["has completed", "(1m ago)", "after 1 retry.", "5 bytes", "--result"],
    ),
    (
        "completed",
        "nothing",
        {"retry_count": 0, "result_size": None},
        ["after no retries", f"ffd execution show '{ID}'."],
    ),
    (
        "failed",
        "nothing",
        {"terminal_at_ms": NOW, "retry_count": 3, "failure_message": "no"},
        ["has failed for good", "after 3 retries", "The failure was: 'no'", f"ffd execution replay '{ID}'"],
    ),
    ("expired", "nothing", {"terminal_at_ms": NOW}, ["its time ran out"]),
    ("skipped", "nothing", {"terminal_at_ms": NOW}, ["what it depended on did not succeed"]),
    (
        "cancelled",
        "nothing",
        {"terminal_at_ms": NOW, "cancellation_reason": "wrong"},
        ["was cancelled", "given: 'wrong'"],
    ),
    ("waiting", "the moon", {}, ["is waiting", "for the moon"]),
]


@pytest.mark.parametrize(("state", "waiting_for", "details", "told"), CASES)
def test_each_is_one_paragraph_that_ends_with_a_step(
    state: str, waiting_for: str, details: dict[str, Any], told: list[str]
) -> None:
    explanation = Explanation(PublicState(state), waiting_for, NOW - 5 * MINUTE, details, "Do this.")
    text = paragraph(ID, explanation, NOW)
    assert text.startswith(ID)
    for part in (*told, "Next step: Do this."):
        assert part in text
    assert text.isprintable()
    assert "None" not in text
    assert "  " not in text


def test_every_state_is_covered() -> None:
    assert {state for state, *_ in CASES} == set(PublicState)
