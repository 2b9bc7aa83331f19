"""`ffd signal send`: with a token, as an operator, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ffd import Engine
from tests.cli.calls import NO_UUID, NOBODY, Cli, act, call, claim, execute, suspended


def test_a_signal_with_its_token_resumes_the_execution(dsn: str, tmp_path: Path) -> None:
    execution_id, waitpoint_id, token = suspended(dsn)
    (tmp_path / "token").write_text(f"{token}\n")
    line = "signal", "send", execution_id, waitpoint_id, "approve", "--token-file", "token", "--source", "ada"
    done = call(*line, "--payload", "yes", dsn=dsn, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("delivered ")
    assert "the execution resumes" in done.out
    assert token not in done.out

    async def signals(engine: Engine) -> list[tuple[str, str, str, bytes | None]]:
        claimed = await claim(engine)
        seen = await engine.observe_signals(claimed.handle)
        return [(each.signal_name, each.source_type, each.source_identity, each.payload) for each in seen]

    assert act(dsn, signals) == [("approve", "cli", "ada", b"yes")]


def test_the_token_comes_from_stdin_or_the_environment(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    execution_id, waitpoint_id, token = suspended(cli.dsn)
    line = "signal", "send", execution_id, waitpoint_id
    ignored = cli(*line, "comment", "--token-file", "-", "--json", stdin=token).json
    assert (ignored["result"], ignored["effect"]) == ("accepted", "appended_to_waitpoint")
    monkeypatch.setenv("FFD_WAITPOINT_TOKEN", f"{token}\n")
    counted = cli(*line, "approve", "--json").json
    assert counted["effect"] == "resume_condition_satisfied"
    late = cli(*line, "approve", "--json")
    assert (late.code, late.error["code"]) == (1, "state.waitpoint_closed")


def test_a_repeated_key_counts_once(cli: Cli) -> None:
    execution_id, waitpoint_id, token = suspended(cli.dsn)
    line = "signal", "send", execution_id, waitpoint_id, "comment", "--token-file", "-", "--idempotency-key", "click-1"
    first = cli(*line, "--json", stdin=token).json
    assert cli(*line, "--json", stdin=token).json == {"result": "duplicate", "signal_id": first["signal_id"]}
    again = cli(*line, stdin=token)
    assert (again.code, again.out) == (0, f"delivered before as {first['signal_id']}; nothing was changed\n")


@pytest.mark.parametrize("token", ["k1:" + "0" * 64, "nonsense", "unknown:" + "a" * 64])
def test_a_wrong_token_is_refused_and_not_repeated(cli: Cli, token: str) -> None:
    execution_id, waitpoint_id, _ = suspended(cli.dsn)
    done = cli("signal", "send", execution_id, waitpoint_id, "approve", "--token-file", "-", "--json", stdin=token)
    assert (done.code, done.error["code"]) == (1, "validation.invalid_token")
    assert token not in done.err


def test_an_operator_approves_without_a_token_and_once(dsn: str) -> None:
    execution_id, waitpoint_id, _ = suspended(dsn)
    line = "signal", "send", execution_id, waitpoint_id, "approve", "--approve", "--actor", "ada"
    done = call(*line, dsn=dsn)
    assert (done.code, done.err) == (0, "")
    assert "the execution resumes" in done.out
    assert execute(dsn, "select source_identity from ff_signal_event") == "ada"
    again = call(*line, "--json", dsn=dsn)
    assert again.json["result"] == "duplicate"


def test_approving_at_an_unknown_waitpoint_is_not_found(cli: Cli) -> None:
    execution_id, _, _ = suspended(cli.dsn)
    done = cli("signal", "send", execution_id, NO_UUID, "approve", "--approve")
    assert (done.code, done.err) == (1, f"Error: waitpoint not found: {NO_UUID}\n")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "A token is needed"),
        (("--token", "k1:00"), "--token"),
        (("--approve", "--token-file", "-"), "neither a token nor a payload"),
        (("--approve", "--payload", "x"), "neither a token nor a payload"),
        (("--approve", "--actor", ""), "--actor"),
        (("--approve", "--idempotency-key", "k" * 49), "--idempotency-key"),
        (("--token-file", "-", "--payload-file", "-"), "stdin is read by another option"),
        (("--token-file", "-", "--payload", "x" * 65537), "more than 65536 bytes"),
        (("--token-file", "absent"), "cannot read absent"),
        (("--token-file", "-", "--source-type", ""), "--source-type"),
        (("--token-file", "-", "--source", "s" * 257), "--source"),
    ],
)
def test_usage_errors(cli_down: Cli, options: tuple[str, ...], told: str) -> None:
    done = cli_down("signal", "send", NOBODY, NO_UUID, "approve", *options)
    assert (done.code, done.out) == (2, "")
    assert told in done.err
    assert cli_down("signal", "send", NOBODY, "nonsense", "approve", "--approve").code == 2
