"""`ffd waitpoint list`: open waitpoints and suspended executions, never a token."""

from __future__ import annotations

import pytest

from ffd import Fresh, Suspend, Suspended, all_of_waitpoints
from ffd.engine import Engine
from tests.cli.calls import NO_UUID, NOBODY, SECRET, Cli, act, call, claim, create, suspended


def test_the_open_waitpoints_of_an_execution_are_listed_without_tokens(dsn: str) -> None:
    execution_id, waitpoint_id, token = suspended(dsn)
    done = call("waitpoint", "list", execution_id, dsn=dsn)
    assert (done.code, done.err) == (0, "")
    title, row = done.out.splitlines()
    assert title.split()[:6] == ["WAITPOINT", "KEY", "STATE", "SIGNALS", "KID", "FINGERPRINT"]
    mac = token.rpartition(":")[2]
    assert row.split()[:6] == [waitpoint_id, "approval", "active", "approve", "k1", mac[:16]]
    assert mac not in done.out


def test_waitpoints_in_json_and_by_pages(cli: Cli) -> None:
    async def three(engine: Engine) -> str:
        await engine.seed_waitpoint_hmac_secret("k1", SECRET)
        await engine.create_execution()
        claimed = await claim(engine)
        keys = ["a", "b", "c"]
        answer = await engine.suspend(claimed.handle, Suspend([Fresh(key) for key in keys], all_of_waitpoints(keys)))
        assert isinstance(answer, Suspended)
        return claimed.execution_id

    execution_id = act(cli.dsn, three)
    first = cli("waitpoint", "list", execution_id, "--limit", "2", "--json").json
    assert len(first["items"]) == 2
    assert not any("token" in name for name in first["items"][0] if name not in ("token_kid", "token_fingerprint"))
    told = cli("waitpoint", "list", execution_id, "--limit", "2").out.splitlines()[-1]
    assert told == f"next page: ffd waitpoint list '{execution_id}' --limit 2 --after {first['next']}"
    second = cli("waitpoint", "list", execution_id, "--after", first["next"], "--json").json
    keys = [item["key"] for item in [*first["items"], *second["items"]]]
    assert (sorted(keys), second["next"]) == (["a", "b", "c"], None)


def test_suspended_executions_are_listed(dsn: str) -> None:
    execution_id, _, _ = suspended(dsn, reason="waiting_for_approval")
    create(dsn)
    done = call("waitpoint", "list", "--suspended", dsn=dsn)
    assert (done.code, done.err) == (0, "")
    title, row = done.out.splitlines()
    assert title.split() == ["EXECUTION", "LANE", "REASON", "SUSPENDED", "TIMEOUT"]
    assert row.split()[:3] == [execution_id, "default", "waiting_for_approval"]


def test_suspended_executions_by_lane_and_in_json(cli: Cli) -> None:
    execution_id, _, _ = suspended(cli.dsn)
    document = cli("waitpoint", "list", "--suspended", "--lane", "default", "--json").json
    assert [item["execution_id"] for item in document["items"]] == [execution_id]
    assert cli("waitpoint", "list", "--suspended", "--lane", "other").out == "no suspended executions\n"
    assert cli("waitpoint", "list", "--suspended", "--after", execution_id).out == "no suspended executions\n"


def test_no_waitpoints_and_no_execution_are_told_apart(cli: Cli) -> None:
    assert cli("waitpoint", "list", create(cli.dsn)).out == "no open waitpoints\n"
    unknown = cli("waitpoint", "list", NOBODY)
    assert (unknown.code, unknown.err) == (1, f"Error: execution not found: {NOBODY}\n")


@pytest.mark.parametrize(
    "line",
    [
        (),
        (NOBODY, "--suspended"),
        (NOBODY, "--lane", "mail"),
        (NOBODY, "--after", NOBODY),
        ("--suspended", "--after", NO_UUID),
        ("nonsense",),
        (NOBODY, "--limit", "1001"),
    ],
)
def test_usage_errors(cli_down: Cli, line: tuple[str, ...]) -> None:
    done = cli_down("waitpoint", "list", *line)
    assert (done.code, done.out) == (2, "")
    assert "Usage: ffd waitpoint list" in done.err
