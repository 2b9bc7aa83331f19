"""`ffd keys`: seeding, rotating and listing, and that no secret ever shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.calls import SECRET, Cli, act, call, execute, suspended

STORED = "select encode(secret, 'hex') from ff_waitpoint_hmac where kid = $1"


def test_seed_makes_a_random_secret_and_shows_none(dsn: str) -> None:
    done = call("keys", "seed", "--kid", "k1", dsn=dsn)
    assert (done.code, done.out, done.err) == (0, "seeded k1; it signs now\n", "")
    secret = execute(dsn, STORED, "k1")
    assert len(secret) == 64
    again = call("keys", "seed", "--kid", "k1", "--json", dsn=dsn)
    assert again.json == {"result": "already_seeded", "kid": "k1", "same_secret": False}
    assert execute(dsn, STORED, "k1") == secret


def test_seed_takes_its_secret_from_a_file_or_from_stdin(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    assert cli("keys", "seed", "--kid", "k1", "--secret-file", "secret").code == 0
    assert execute(cli.dsn, STORED, "k1") == SECRET
    same = cli("keys", "seed", "--kid", "k1", "--secret-file", "-", "--json", stdin=SECRET).json
    assert same == {"result": "already_seeded", "kid": "k1", "same_secret": True}
    other = cli("keys", "seed", "--kid", "k1", "--secret-file", "-", "--json", stdin="cd" * 32)
    assert (other.code, other.error["code"]) == (1, "other_secret")
    beside = cli("keys", "seed", "--kid", "k2")
    assert beside.code == 1
    assert "'k1' signs already" in beside.err


@pytest.mark.parametrize("content", ["", "ab" * 31, "xy" * 32, "ab" * 33, "grün", "a" * 5000])
def test_a_malformed_secret_is_refused_and_not_repeated(cli_down: Cli, content: str) -> None:
    done = cli_down("keys", "seed", "--kid", "k1", "--secret-file", "-", stdin=content)
    assert (done.code, done.out) == (2, "")
    assert "--secret-file" in done.err
    assert not content or content not in done.err


def test_a_typed_secret_is_not_echoed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getpass", lambda _prompt: SECRET)
    assert cli("keys", "seed", "--kid", "k1", "--secret-file", "-", is_terminal=True, stdin="other").code == 0
    assert execute(cli.dsn, STORED, "k1") == SECRET


@pytest.mark.parametrize(
    "line", [("seed",), ("seed", "--kid", "a:b"), ("seed", "--kid", ""), ("seed", "--kid", "a\nb")]
)
def test_a_key_needs_a_name(cli_down: Cli, line: tuple[str, ...]) -> None:
    assert cli_down("keys", *line).code == 2


def test_no_command_takes_a_secret_as_an_argument(cli_down: Cli) -> None:
    assert cli_down("keys", "seed", "--kid", "k1", "--secret", SECRET).code == 2
    assert cli_down("keys", "seed", "--kid", "k1", SECRET).code == 2


def test_rotate_signs_with_the_new_key_and_keeps_the_old_for_its_grace(dsn: str) -> None:
    call("keys", "seed", "--kid", "k1", dsn=dsn)
    done = call("keys", "rotate", "--kid", "k2", "--grace", "7d", "--yes", dsn=dsn)
    assert (done.code, done.out, done.err) == (0, "k2 signs now; tokens of k1 hold for 7d more\n", "")
    keys = act(dsn, lambda engine: engine.list_waitpoint_keys())
    assert [(key.kid, key.is_active) for key in keys] == [("k2", True), ("k1", False)]


def test_rotate_asks_and_says_what_becomes_of_tokens(cli: Cli) -> None:
    cli("keys", "seed", "--kid", "k1")
    line = "keys", "rotate", "--kid", "k2", "--grace"
    assert cli(*line, "1h").code == 2
    declined = cli(*line, "0s", is_terminal=True, stdin="n\n")
    assert declined.code == 1
    assert "stop working at once" in declined.err
    agreed = cli(*line, "1h", is_terminal=True, stdin="y\n")
    assert agreed.code == 0
    assert "of k1 hold for 1h more" in agreed.err
    assert [key.kid for key in act(cli.dsn, lambda engine: engine.list_waitpoint_keys())] == ["k2", "k1"]


def test_rotate_in_json(cli: Cli) -> None:
    line = "keys", "rotate", "--kid", "k1", "--grace", "1h", "--secret-file", "-", "--yes", "--json"
    first = cli(*line, stdin=SECRET).json
    assert first == {"result": "rotated", "previous_kid": None, "new_kid": "k1", "gc_count": 0}
    assert cli(*line, stdin=SECRET).json == {"result": "noop", "kid": "k1"}
    other = cli(*line, stdin="cd" * 32)
    assert (other.code, other.error["code"]) == (1, "conflict.rotation_conflict")
    assert cli("keys", "rotate", "--kid", "k2", "--yes").code == 2
    assert cli("keys", "rotate", "--kid", "k2", "--grace", "9999999d", "--yes").code == 2


def test_list_shows_names_and_times_and_never_a_secret(dsn: str) -> None:
    suspended(dsn)
    call("keys", "rotate", "--kid", "k2", "--grace", "1h", "--yes", dsn=dsn)
    done = call("keys", "list", dsn=dsn)
    assert (done.code, done.err) == (0, "")
    title, signing, verifying = done.out.splitlines()
    assert title.split() == ["KID", "STATE", "SIGNS", "SINCE", "VERIFIES", "UNTIL"]
    assert signing.split()[:2] == ["k2", "signs"]
    assert verifying.split()[:2] == ["k1", "verifies"]
    assert "(in 59m)" in verifying or "(in 1h)" in verifying
    assert SECRET not in done.out


def test_list_in_json_and_empty(cli: Cli) -> None:
    assert cli("keys", "list", "--json").json == {"items": [], "next": None}
    assert "ffd keys seed" in cli("keys", "list").out
    cli("keys", "seed", "--kid", "k1")
    (key,) = cli("keys", "list", "--json").json["items"]
    assert (set(key), key["kid"]) == ({"kid", "is_active", "rotated_at_ms", "verifies_until_ms"}, "k1")
