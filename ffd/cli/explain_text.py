"""An explanation in sentences: what the execution waits for, since when, and what a person can do about it.

Written to be read at night. Every figure comes from the engine's `Explanation`; nothing is guessed here. A figure
that is missing leaves its sentence out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ffd.cli.output import printable
from ffd.cli.times import ago, duration, iso, moment
from ffd.core.records import Explanation
from ffd.core.state import PublicState

Details = dict[str, Any]


def paragraph(execution_id: str, explanation: Explanation, now_ms: int) -> str:
    """Why the execution is where it is, and the next step."""
    told = _TELL.get(explanation.waiting_for, _other)(execution_id, explanation, now_ms)
    return printable(" ".join(sentence for sentence in told if sentence))


def _since(explanation: Explanation, now_ms: int) -> str:
    return f"for {duration(max(0, now_ms - explanation.since_ms))} (since {iso(explanation.since_ms)})"


def _next(explanation: Explanation, *commands: str) -> str:
    step = f"Next step: {explanation.next_step}"
    return step if not commands else f"{step} Try: {'; '.join(commands)}."


def _worker(execution_id: str, explanation: Explanation, now_ms: int) -> list[str]:
    details = explanation.details
    ready = "could go on" if explanation.state == PublicState.RESUMABLE else "is ready to run"
    needs = ", ".join(details.get("required_capabilities") or ())
    needing = f", with the capabilities {needs}" if needs else ""
    return [
        f"{execution_id} {ready} and has been waiting {_since(explanation, now_ms)} for a worker"
        f" on lane {details.get('lane')}{needing}.",
        _queue(details),
        _next(explanation),
    ]


def _queue(details: Details) -> str:
    ahead = details.get("ahead")
    if ahead is None:
        return ""
    if not ahead:
        return (
            "Nothing with the same needs is ahead of it, so the next free worker takes it:"
            " if none does, no worker serves this lane with these capabilities, or all of them are busy."
        )
    many = f"{ahead} or more" if details.get("is_ahead_capped") else str(ahead)
    verb = "is" if ahead == 1 else "are"
    return f"{many} with the same needs {verb} ahead of it (its priority is {details.get('priority')})."


_PUT_OFF: Final = {
    "retry_backoff": "failed, and its next attempt waits for its backoff",
    "resume_delay": "was resumed with a delay",
    "delay": "was put off",
}


def _delay(execution_id: str, explanation: Explanation, now_ms: int) -> list[str]:
    details = explanation.details
    failure = details.get("failure_message")
    due_at_ms = details.get("due_at_ms")
    if due_at_ms is None:
        due = ""
    elif due_at_ms > now_ms:
        due = f"It is due at {moment(due_at_ms, now_ms)}."
    else:
        due = f"It was due at {moment(due_at_ms, now_ms)} and nobody has made it claimable: the daemon is down or late."
    return [
        f"{execution_id} {_PUT_OFF[explanation.waiting_for]} {ago(explanation.since_ms, now_ms)}.",
        due,
        f"The last failure was: {failure!r}." if failure else "",
        _next(explanation),
    ]


def _dependencies(execution_id: str, explanation: Explanation, now_ms: int) -> list[str]:
    flow_id, open_edges = explanation.details.get("flow_id"), explanation.details.get("open_edges")
    if open_edges:
        edges = f"{open_edges} edge{'s' if open_edges != 1 else ''} into it {'are' if open_edges != 1 else 'is'} open."
    else:
        edges = "No edge into it is open any more: the daemon will release it."
    return [
        f"{execution_id} has been waiting {_since(explanation, now_ms)} for other members of its flow.",
        edges,
        _next(explanation, *([f"ffd flow show {flow_id}"] if flow_id else [])),
    ]


def _who(details: Details) -> str:
    worker, instance = details.get("worker_id"), details.get("worker_instance_id")
    return f"worker {worker or 'unknown'}" + (f" (instance {instance})" if instance else "")


def _owner(execution_id: str, explanation: Explanation, now_ms: int) -> list[str]:
    details = explanation.details
    expires, percent = details.get("lease_expires_at_ms"), details.get("progress_percent")
    message = details.get("progress_message")
    progress = " ".join(
        part for part in ("" if percent is None else f"{percent} %", f"({message!r})" if message else "") if part
    )
    return [
        f"{execution_id} is running: {_who(details)} has had it {_since(explanation, now_ms)}.",
        "" if expires is None else f"The lease holds until {moment(expires, now_ms)} unless it is renewed.",
        f"Last progress: {progress}." if progress else "The worker has reported no progress.",
        _next(explanation, f"ffd execution revoke '{execution_id}'"),
    ]


def _lease_expiry(execution_id: str, explanation: Explanation, now_ms: int) -> list[str]:
    expires = explanation.details.get("lease_expires_at_ms")
    ran_out = "has no lease" if expires is None else f"let its lease run out at {moment(expires, now_ms)}"
    return [
        f"{execution_id} counts as running, but {_who(explanation.details)} {ran_out} and can do no more harm.",
        _next(explanation, f"ffd execution revoke '{execution_id}' offers it to other workers at once"),
    ]


def _signal(execution_id: str, explanation: Explanation, now_ms: int) -> list[str]:
    return [
        f"{execution_id} is suspended and has been waiting {_since(explanation, now_ms)} for signals"
        f"{_because(explanation.details)}.",
        _timeout(explanation.details, now_ms),
        _next(explanation, f"ffd waitpoint list '{execution_id}'"),
    ]


def _operator(execution_id: str, explanation: Explanation, now_ms: int) -> list[str]:
    return [
        f"{execution_id} is suspended and has been waiting {_since(explanation, now_ms)} for an operator"
        f"{_because(explanation.details)}.",
        _timeout(explanation.details, now_ms),
        _next(explanation, f"ffd execution resume '{execution_id}'", f"ffd execution cancel '{execution_id}'"),
    ]


def _because(details: Details) -> str:
    reason = details.get("reason")
    return f", reason {reason}" if reason else ""


def _timeout(details: Details, now_ms: int) -> str:
    timeout_at_ms = details.get("timeout_at_ms")
    if timeout_at_ms is None:
        return "It has no timeout: without them it waits for good."
    if timeout_at_ms > now_ms:
        return f"Its timeout comes at {moment(timeout_at_ms, now_ms)}."
    return f"Its timeout came at {moment(timeout_at_ms, now_ms)} and was not acted on: the daemon is down or late."


_ENDED: Final = {
    PublicState.COMPLETED: "has completed",
    PublicState.FAILED: "has failed for good",
    PublicState.EXPIRED: "has expired: its time ran out",
    PublicState.SKIPPED: "was skipped: what it depended on did not succeed",
    PublicState.CANCELLED: "was cancelled",
}


def _nothing(execution_id: str, explanation: Explanation, now_ms: int) -> list[str]:
    details = explanation.details
    ended_at_ms = details.get("terminal_at_ms") or explanation.since_ms
    failure, cancelled = details.get("failure_message"), details.get("cancellation_reason")
    retries = details.get("retry_count")
    is_done = explanation.state == PublicState.COMPLETED
    if is_done:
        command = f"ffd execution show '{execution_id}'" + (" --result" if details.get("result_size") else "")
    else:
        command = f"ffd execution replay '{execution_id}'"
    return [
        f"{execution_id} {_ENDED.get(explanation.state, 'has ended')}, at {moment(ended_at_ms, now_ms)},"
        f" after {retries or 'no'} {'retry' if retries == 1 else 'retries'}.",
        f"The failure was: {failure!r}." if failure else "",
        f"The reason given: {cancelled!r}." if cancelled else "",
        f"Its result has {details['result_size']} bytes." if details.get("result_size") is not None else "",
        _next(explanation, command),
    ]


def _other(execution_id: str, explanation: Explanation, now_ms: int) -> list[str]:
    """What a newer engine may add still gets its step told."""
    return [
        f"{execution_id} is {explanation.state} and has been waiting {_since(explanation, now_ms)}"
        f" for {explanation.waiting_for}.",
        _next(explanation),
    ]


_TELL: Final[dict[str, Callable[[str, Explanation, int], list[str]]]] = {
    "worker": _worker,
    "delay": _delay,
    "retry_backoff": _delay,
    "resume_delay": _delay,
    "dependencies": _dependencies,
    "owner": _owner,
    "lease_expiry": _lease_expiry,
    "signal": _signal,
    "operator": _operator,
    "nothing": _nothing,
}
