"""The commands of `ffd execution` that steer, and the question that stands before what destroys."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from ffd import Engine
from tests.cli.calls import NOBODY, Cli, act, call, completed, create, environment, execute, running, suspended

LAST_EVENT = "select {} from ff_operator_event order by event_id desc limit 1"


def state(dsn: str, execution_id: str) -> str:
    snapshot = act(dsn, lambda engine: engine.describe_execution(execution_id))
    assert snapshot is not None
    return snapshot.public_state.value


# cancel


def test_cancel_ends_an_execution_and_keeps_who_and_why(dsn: str) -> None:
    execution_id = create(dsn)
    done = call("execution", "cancel", execution_id, "--yes", "--reason", "wrong", "--actor", "ada", dsn=dsn)
    assert (done.code, done.out, done.err) == (0, f"cancelled {execution_id}\n", "")
    assert state(dsn, execution_id) == "cancelled"
    assert execute(dsn, LAST_EVENT.format("actor || ':' || reason")) == "ada:wrong"


def test_the_actor_is_the_user_by_default(cli: Cli) -> None:
    document = cli("execution", "cancel", create(cli.dsn), "-y", "--json").json
    assert document["public_state"] == "cancelled"
    assert execute(cli.dsn, LAST_EVENT.format("actor")) == "ada"


def test_what_ended_otherwise_cannot_be_cancelled(cli: Cli) -> None:
    execution_id = completed(cli.dsn, None)
    done = cli("execution", "cancel", execution_id, "--yes", "--json")
    assert (done.code, done.error["code"]) == (1, "validation.invalid_input")
    assert "completed" in done.error["message"]


# The question


@pytest.mark.parametrize("answer", ["y\n", "n\n"])
def test_on_a_terminal_cancel_shows_what_it_hits_and_asks(dsn: str, answer: str) -> None:
    claimed = running(dsn, lane="mail", kind="shout")
    master, slave = pty.openpty()
    os.write(master, answer.encode())
    done = subprocess.run(
        [sys.executable, "-m", "ffd.cli.main", "execution", "cancel", claimed.execution_id],
        env=environment(dsn),
        stdin=slave,
        capture_output=True,
        text=True,
        timeout=60,
    )
    os.close(master)
    os.close(slave)
    for shown in (claimed.execution_id, "lane         mail", "state        running", "worker       w / w-1"):
        assert shown in done.stderr
    assert "Cancel it? [y/N]:" in done.stderr
    if answer == "y\n":
        assert (done.returncode, done.stdout) == (0, f"cancelled {claimed.execution_id}\n")
        assert state(dsn, claimed.execution_id) == "cancelled"
    else:
        assert (done.returncode, done.stdout) == (1, "")
        assert "nothing was changed" in done.stderr
        assert state(dsn, claimed.execution_id) == "running"


@pytest.mark.parametrize("name", ["cancel", "revoke"])
def test_without_a_terminal_only_yes_goes_ahead(cli_down: Cli, name: str) -> None:
    done = cli_down("execution", name, NOBODY)
    assert (done.code, done.out) == (2, "")
    assert "pass --yes" in done.err
    as_json = cli_down("execution", name, NOBODY, "--json", is_terminal=True)
    assert (as_json.code, as_json.error["code"]) == (2, "usage")
    assert "--json never asks" in as_json.error["message"]


def test_nobody_is_asked_about_what_is_not_there(cli: Cli) -> None:
    done = cli("execution", "cancel", NOBODY, is_terminal=True, stdin="y\n")
    assert done.code == 1
    assert done.err == f"Error: execution not found: {NOBODY}\n"


# revoke


def test_revoke_takes_the_lease_and_says_when_there_is_none(dsn: str) -> None:
    claimed = running(dsn)
    line = "execution", "revoke", claimed.execution_id, "--reason", "hangs", "--yes"
    done = call(*line, dsn=dsn)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"revoked {claimed.lease_id};")
    assert state(dsn, claimed.execution_id) == "waiting"
    again = call(*line, dsn=dsn)
    assert (again.code, again.out) == (0, "nothing to revoke: no_active_lease\n")


def test_revoke_takes_only_the_lease_that_is_meant(cli: Cli) -> None:
    claimed = running(cli.dsn)
    line = "execution", "revoke", claimed.execution_id, "--yes", "--json"
    other = cli(*line, "--worker-instance", "w-2").json
    assert (other["result"], other["reason"]) == ("already_satisfied", "different_worker_instance_id")
    stale = claimed.lease_id.rpartition(":")[0] + ":99"
    assert cli(*line, "--lease-id", stale).json["reason"] == "lease_id_mismatch"
    assert cli(*line, "--lease-id", "nonsense").code == 2
    taken = cli(*line, "--lease-id", claimed.lease_id, "--worker-instance", "w-1").json
    assert (taken["result"], taken["lease_id"]) == ("revoked", claimed.lease_id)
    assert taken["lease_epoch"] > claimed.lease_epoch


def test_a_confirmed_revoke_hits_the_lease_that_was_shown(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = running(cli.dsn)

    def confirm(_question: str, **_options: object) -> bool:
        async def change_hands(engine: Engine) -> None:
            await engine.release(claimed.handle)
            assert await engine.claim("default", worker_id="next", worker_instance_id="next-1") is not None

        act(cli.dsn, change_hands)
        return True

    # Called while the command waits for its answer, outside its event loop.
    monkeypatch.setattr("click.confirm", confirm)
    done = cli("execution", "revoke", claimed.execution_id, is_terminal=True)
    assert (done.code, done.out) == (0, "nothing to revoke: lease_id_mismatch\n")
    assert state(cli.dsn, claimed.execution_id) == "running"


# replay


def test_replay_runs_again_and_asks_only_about_a_result(dsn: str) -> None:
    execution_id = create(dsn)
    call("execution", "cancel", execution_id, "--yes", dsn=dsn)
    done = call("execution", "replay", execution_id, "--reason", "again", dsn=dsn)
    assert (done.code, done.out, done.err) == (0, f"replayed {execution_id}: it is waiting\n", "")
    assert state(dsn, execution_id) == "waiting"


def test_replay_does_not_drop_a_result_unasked(cli: Cli) -> None:
    execution_id = completed(cli.dsn, b"12345")
    refused = cli("execution", "replay", execution_id)
    assert refused.code == 2
    assert "pass --yes" in refused.err
    asked = cli("execution", "replay", execution_id, is_terminal=True, stdin="n\n")
    assert asked.code == 1
    assert "5 bytes, which will be dropped" in asked.err
    assert state(cli.dsn, execution_id) == "completed"
    replayed = cli("execution", "replay", execution_id, "--yes", "--json").json
    assert replayed == {"execution_id": execution_id, "public_state": "waiting"}


def test_what_has_not_ended_cannot_be_replayed(cli: Cli) -> None:
    done = cli("execution", "replay", create(cli.dsn), "--json")
    assert (done.code, done.error["code"]) == (1, "state.execution_not_terminal")


# priority


def test_priority_moves_waiting_work(dsn: str) -> None:
    execution_id = create(dsn, priority=5)
    done = call("execution", "priority", execution_id, "100", dsn=dsn)
    assert (done.code, done.out, done.err) == (0, f"priority of {execution_id}: 5 → 100\n", "")


def test_priority_is_clamped_and_needs_claimable_work(cli: Cli) -> None:
    execution_id = create(cli.dsn)
    changed = cli("execution", "priority", execution_id, "99999", "--json").json
    assert changed == {"execution_id": execution_id, "old_priority": 0, "new_priority": 9000}
    running_id = running(cli.dsn, lane="busy").execution_id
    refused = cli("execution", "priority", running_id, "1", "--json")
    assert (refused.code, refused.error["code"]) == (1, "contention.execution_not_eligible")
    assert cli("execution", "priority", execution_id, "high").code == 2


# resume


def test_resume_lets_a_suspended_execution_go_on(dsn: str) -> None:
    execution_id, _, _ = suspended(dsn)
    done = call("execution", "resume", execution_id, "--reason", "by phone", "--actor", "ada", dsn=dsn)
    assert (done.code, done.out, done.err) == (0, f"resumed {execution_id}\n", "")
    assert state(dsn, execution_id) == "resumable"
    assert execute(dsn, LAST_EVENT.format("actor || ':' || reason")) == "ada:by phone"


def test_resume_with_a_delay_and_of_what_is_not_suspended(cli: Cli) -> None:
    execution_id, _, _ = suspended(cli.dsn)
    document = cli("execution", "resume", execution_id, "--delay", "5m", "--json").json
    assert document == {"execution_id": execution_id, "resume_delay_ms": 300_000}
    assert state(cli.dsn, execution_id) == "delayed"
    again = cli("execution", "resume", execution_id)
    assert again.code == 1
    assert "not suspended but delayed" in again.err


@pytest.mark.parametrize(
    "line", [("cancel", "--yes"), ("revoke", "--yes"), ("replay",), ("replay", "--yes"), ("priority", "5"), ("resume",)]
)
def test_an_unknown_execution_is_not_found(cli: Cli, line: tuple[str, ...]) -> None:
    name, *rest = line
    done = cli("execution", name, NOBODY, *rest)
    assert (done.code, done.out) == (1, "")
    assert f"execution not found: {NOBODY}" in done.err
