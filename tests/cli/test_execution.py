"""`ffd execution`: creating and looking. What steers is in test_control."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ffd import Engine, FailureClass
from tests.cli.calls import NO_UUID, NOBODY, Cli, act, call, claim, completed, create, execute, running, stop_clock

ID = re.compile(r"\{fp:\d+\}:[0-9a-f-]{36}")


# create


def test_create_prints_the_id_and_nothing_else(dsn: str) -> None:
    done = call("execution", "create", "--lane", "mail", "--kind", "shout", "--payload", "grüße", dsn=dsn)
    assert (done.code, done.err) == (0, "")
    assert ID.fullmatch(done.out.removesuffix("\n"))
    claimed = act(dsn, lambda engine: claim(engine, "mail"))
    assert claimed.execution_id == done.out.strip()
    assert (claimed.kind, claimed.payload) == ("shout", "grüße".encode())


def test_create_takes_every_field(cli: Cli) -> None:
    flow = act(cli.dsn, lambda engine: engine.create_flow()).flow_id
    line = (
        *("execution", "create", "--json", "--lane", "mail", "--priority", "12", "--namespace", "shop"),
        *("--capability", "gpu", "--capability", "big", "--tag", "shop.customer=c-9", "--tag", "shop.note=a=b"),
        *("--flow", flow, "--max-retries", "7", "--attempt-timeout", "90s", "--payload-file", "-"),
    )
    created = cli(*line, stdin="body").json
    assert set(created) == {"execution_id", "public_state", "is_duplicate"}
    assert (created["public_state"], created["is_duplicate"]) == ("waiting", False)
    snapshot = act(cli.dsn, lambda engine: engine.describe_execution(created["execution_id"]))
    assert snapshot is not None
    assert (snapshot.lane, snapshot.priority, snapshot.namespace, snapshot.flow_id) == ("mail", 12, "shop", flow)
    assert snapshot.required_capabilities == ["big", "gpu"]
    assert snapshot.tags == {"shop.customer": "c-9", "shop.note": "a=b"}
    assert execute(cli.dsn, "select payload from ff_exec_core") == b"body"
    assert execute(cli.dsn, "select policy #>> '{retry_policy,max_retries}' from ff_exec_core") == "7"
    assert execute(cli.dsn, "select policy #>> '{timeout_policy,attempt_timeout_ms}' from ff_exec_core") == "90000"


def test_delay_and_deadline_count_on_the_database_clock(cli: Cli) -> None:
    stop_clock(cli.dsn, 1_000_000)
    created = cli("execution", "create", "--delay", "1h30m", "--deadline", "2h", "--json").json
    assert created["public_state"] == "delayed"
    snapshot = act(cli.dsn, lambda engine: engine.describe_execution(created["execution_id"]))
    assert snapshot is not None
    assert (snapshot.delay_until_ms, snapshot.deadline_at_ms) == (1_000_000 + 5_400_000, 1_000_000 + 7_200_000)


def test_a_repeated_create_gives_the_first_and_says_so_beside_it(cli: Cli) -> None:
    line = "execution", "create", "--idempotency-key", "order-17"
    first, second = cli(*line), cli(*line)
    assert first.out == second.out
    assert (first.err, second.code) == ("", 0)
    assert "existed already" in second.err
    assert cli(*line, "--json").json["is_duplicate"] is True
    by_id = cli("execution", "create", "--id", NOBODY).out.strip()
    assert by_id == NOBODY


def test_a_payload_comes_from_a_file_or_from_the_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"\x00\xff")
    (tmp_path / "big").write_bytes(b"x" * (1024 * 1024 + 1))
    cli("execution", "create", "--payload-file", "body")
    assert execute(cli.dsn, "select payload from ff_exec_core") == b"\x00\xff"
    assert cli("execution", "create", "--payload-file", "big").code == 2
    assert "cannot read absent" in cli("execution", "create", "--payload-file", "absent").err
    both = cli("execution", "create", "--payload", "a", "--payload-file", "body")
    assert both.code == 2
    assert "exclude each other" in both.err
    assert execute(cli.dsn, "select count(*) from ff_exec_core") == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--delay", "5"), "30s, 5m"),
        (("--delay", "-1s"), "30s, 5m"),
        (("--deadline", "0s"), "expected 1ms to"),
        (("--delay", "99999d"), "expected 0ms to"),
        (("--tag", "novalue"), "key=value"),
        (("--tag", "Bad=1"), "namespace.name"),
        (("--capability", "a b"), "white space"),
        (("--lane", "x" * 65), "1..64"),
        (("--lane", ""), "1..64"),
        (("--kind", "k" * 257), "0..256 bytes"),
        (("--id", "nonsense"), "{fp:N}:<uuid>"),
        (("--id", f"{{fp:256}}:{NO_UUID}"), "0..255"),
        (("--flow", "nonsense"), "uuid"),
        (("--max-retries", "-1"), "range"),
        (("--idempotency-key", ""), "1..256 bytes"),
        (("--namespace", ""), "1..256 bytes"),
        (("--priority", "high"), "integer"),
    ],
)
def test_a_wrong_field_is_a_usage_error_before_the_database_is_asked(
    cli_down: Cli, options: tuple[str, str], told: str
) -> None:
    done = cli_down("execution", "create", *options)
    assert (done.code, done.out) == (2, "")
    assert options[0] in done.err
    assert told in " ".join(done.err.split())


def test_too_many_tags_are_a_usage_error(cli_down: Cli) -> None:
    tags = [word for number in range(65) for word in ("--tag", f"a.b{number}=1")]
    done = cli_down("execution", "create", *tags)
    assert done.code == 2
    assert "at most 64" in done.err


def test_a_flow_that_is_not_there_fails(cli: Cli) -> None:
    done = cli("execution", "create", "--flow", NO_UUID, "--json")
    assert (done.code, done.error["code"]) == (1, "not_found")
    assert done.error["message"] == f"flow not found: {NO_UUID}"


# list


def test_list_pages_through_and_prints_the_next_command(dsn: str) -> None:
    ids = [create(dsn, lane="mail", kind="shout", tags={"a.b": "x y"}) for _ in range(3)]
    create(dsn, lane="other")
    first = call("execution", "list", "--lane", "mail", "--tag", "a.b=x y", "--limit", "2", dsn=dsn)
    assert (first.code, first.err) == (0, "")
    title, *rows, empty, following = first.out.splitlines()
    assert title.split() == ["EXECUTION", "STATE", "LANE", "KIND", "PRIORITY", "CREATED", "WORKER"]
    assert [row.split()[:5] for row in rows] == [[each, "waiting", "mail", "shout", "0"] for each in ids[:0:-1]]
    assert empty == ""
    assert following == f"next page: ffd execution list --lane mail --tag 'a.b=x y' --limit 2 --after '{ids[1]}'"
    second = call("execution", "list", "--lane", "mail", "--limit", "2", "--after", ids[1], "--json", dsn=dsn)
    assert [item["execution_id"] for item in second.json["items"]] == [ids[0]]
    assert second.json["next"] is None


def test_list_filters_by_state_namespace_and_flow(cli: Cli) -> None:
    flow = act(cli.dsn, lambda engine: engine.create_flow()).flow_id
    member = create(cli.dsn, flow_id=flow)
    delayed = cli("execution", "create", "--delay", "1h", "--namespace", "shop").out.strip()

    def found(*options: str) -> list[str]:
        return [item["execution_id"] for item in cli("execution", "list", *options, "--json").json["items"]]

    assert found("--state", "delayed") == found("--namespace", "shop") == [delayed]
    assert found("--flow", flow) == [member]
    assert len(found()) == 2
    assert cli("execution", "list", "--state", "failed").out == "no executions\n"
    assert cli("execution", "list", "--state", "failed", "--json").json == {"items": [], "next": None}


def test_listings_do_not_let_names_act_on_the_terminal(cli: Cli) -> None:
    evil = "x\x1b[2Jy\n{fp:0}:z\u202e"
    execution_id = create(cli.dsn, kind=evil, tags={"a.b": evil})
    listed = cli("execution", "list").out
    assert len(listed.splitlines()) == 2
    shown = cli("execution", "show", execution_id).out
    for text in (listed, shown):
        assert r"x\x1b[2Jy\n{fp:0}:z\u202e" in text
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert cli("execution", "show", execution_id, "--json").json["kind"] == evil


@pytest.mark.parametrize("options", [("--limit", "0"), ("--limit", "1001"), ("--state", "lost"), ("--after", "x")])
def test_list_refuses_what_is_out_of_bounds(cli_down: Cli, options: tuple[str, str]) -> None:
    assert cli_down("execution", "list", *options).code == 2


# show


def test_show_tells_every_field_and_the_attempts(dsn: str) -> None:
    claimed = running(dsn, lane="mail", kind="shout", payload=b"SECRET-PAYLOAD", tags={"a.b": "c"})
    done = call("execution", "show", claimed.execution_id, dsn=dsn)
    assert (done.code, done.err) == (0, "")
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in done.out.split("\n\n")[0].splitlines())
    assert facts["state"] == "running"
    assert (facts["worker"], facts["worker instance"]) == ("w", "w-1")
    assert facts["lease"] == claimed.lease_id
    assert facts["tags"] == "a.b=c"
    assert facts["result"] == facts["flow"] == "-"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \(in \d+s\)", facts["lease until"])
    title, attempt = done.out.split("\n\n")[1].splitlines()
    assert title.split()[:3] == ["ATTEMPT", "EPOCH", "OUTCOME"]
    assert attempt.split()[:2] == ["0", str(claimed.lease_epoch)]
    assert "SECRET-PAYLOAD" not in done.out


def test_show_in_json_has_the_snapshot_and_the_attempts(cli: Cli) -> None:
    execution_id = completed(cli.dsn, b"12345")
    shown = cli("--json", "execution", "show", execution_id).json
    assert (shown["execution_id"], shown["public_state"], shown["result_size"]) == (execution_id, "completed", 5)
    assert [attempt["outcome"] for attempt in shown["attempts"]] == ["success"]
    waiting = create(cli.dsn)
    assert cli("execution", "show", waiting).out.endswith("\n\nno attempts yet\n")


def test_show_result_writes_its_bytes_and_only_them(dsn: str) -> None:
    done = call("execution", "show", completed(dsn, b"line\nno end"), "--result", dsn=dsn)
    assert (done.code, done.out, done.err) == (0, "line\nno end", "")


def test_without_a_result_show_result_fails(cli: Cli) -> None:
    done = cli("execution", "show", create(cli.dsn), "--result")
    assert (done.code, done.out) == (1, "")
    assert "has no result: it is waiting" in done.err
    assert "not found" in cli("execution", "show", NOBODY, "--result").err
    assert cli("execution", "show", NOBODY, "--result", "--json").code == 2


# explain


def test_explain_is_one_paragraph_with_the_next_step(dsn: str) -> None:
    execution_id = create(dsn, lane="mail")
    done = call("execution", "explain", execution_id, dsn=dsn)
    assert (done.code, done.err) == (0, "")
    assert len(done.out.splitlines()) == 1
    assert done.out.startswith(f"{execution_id} is ready to run")
    assert "Next step: Run a worker on lane 'mail'" in done.out


def test_explain_tells_the_state_of_the_engine(cli: Cli) -> None:
    claimed = running(cli.dsn)

    async def fail(engine: Engine) -> None:
        await engine.fail(claimed.handle, "disk full", FailureClass.PERMANENT)

    assert "worker w (instance w-1) has had it" in cli("execution", "explain", claimed.execution_id).out
    act(cli.dsn, fail)
    told = cli("execution", "explain", claimed.execution_id).out
    assert "has failed for good" in told
    assert "'disk full'" in told
    document = cli("execution", "explain", claimed.execution_id, "--json").json
    assert set(document) == {"execution_id", "state", "waiting_for", "since_ms", "details", "next_step"}
    assert (document["state"], document["waiting_for"]) == ("failed", "nothing")


@pytest.mark.parametrize("name", ["show", "explain"])
def test_an_unknown_id_is_not_found(cli: Cli, name: str) -> None:
    done = cli("execution", name, NOBODY)
    assert (done.code, done.out) == (1, "")
    assert done.err == f"Error: execution not found: {NOBODY}\n"
    assert cli("execution", name, NOBODY, "--json").error["code"] == "not_found"
    assert cli("execution", name, "nonsense").code == 2
