"""Proof before state (I8): a wrong token hears the same whatever exists, and nothing secret is ever told."""

from __future__ import annotations

import asyncio
import logging
import pprint
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec
import pytest
import structlog
from prometheus_client import REGISTRY

from ffd import (
    Accepted,
    AllOf,
    ByName,
    Claim,
    Count,
    Engine,
    EngineError,
    Fresh,
    LeaseFence,
    Signal,
    Single,
    Suspend,
    Suspended,
    SuspensionAlreadySatisfied,
    UsePending,
    Validation,
    ValidationKind,
)
from ffd.core import tokens
from ffd.core.conditions import Condition
from ffd.core.ids import parse_execution_id
from ffd.core.tokens import mint_token
from tests.signalling import (
    APPENDED,
    MANY,
    SECRET,
    SOURCES,
    refused,
    rejections,
    send,
    signal,
    waiting,
)
from tests.support import OTHER, Clock, Rig, stale

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
async def _key(engine: Engine) -> None:
    await engine.seed_waitpoint_hmac_secret("k1", SECRET)


# Proof before state


async def targets(rig: Rig, clock: Clock) -> dict[str, tuple[str, str]]:
    """An execution and a waitpoint in every state that a signal can meet, and those that do not exist."""
    found: dict[str, tuple[str, str]] = {}

    async def add(name: str, condition: Condition = MANY, **suspend: Any) -> tuple[Claim, Suspended]:
        claim, outcome = await waiting(rig, condition, **suspend)
        found[name] = (claim.execution_id, outcome.waitpoints[0].waitpoint_id)
        return claim, outcome

    await add("suspended")
    claim, outcome = await add("delayed", Single("a"), resume_delay_ms=1000)
    await send(rig, signal(claim, outcome.waitpoints[0]))
    claim, outcome = await add("completed", Single("a"))
    await send(rig, signal(claim, outcome.waitpoints[0]))
    await rig.engine.complete((await rig.claim()).handle)
    claim, outcome = await add("running again", Single("a"))
    await send(rig, signal(claim, outcome.waitpoints[0]))
    await rig.claim()
    claim, outcome = await add("gone", Single("a"))
    await rig.sql.execute(
        "delete from ff_exec_core where partition_key = $1 and execution_id = $2",
        *parse_execution_id(claim.execution_id),
    )
    claim = await rig.running()
    pending = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=10**9)
    found["running with a pending waitpoint"] = (claim.execution_id, pending.waitpoint_id)
    found["a waitpoint that never was"] = (claim.execution_id, str(uuid4()))
    claim = await rig.running()
    expired = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=1)
    found["an expired waitpoint"] = (claim.execution_id, expired.waitpoint_id)
    found["never claimed"] = (await rig.create(lane="later"), str(uuid4()))
    found["an execution that never was"] = (f"{{fp:9}}:{uuid4()}", str(uuid4()))
    claim, outcome = await add("resumable", Single("a"))
    await send(rig, signal(claim, outcome.waitpoints[0]))
    await clock.advance(1)
    return found


async def test_a_token_that_does_not_hold_gets_one_answer_whatever_exists(rig: Rig, clock: Clock) -> None:
    """I8, V-002…V-004, V-006…V-008, V-018: same type, kind and text; nothing written but a counter."""
    await rig.engine.rotate_waitpoint_hmac_secret_all("k2", "22" * 32, 5)
    await rig.engine.rotate_waitpoint_hmac_secret_all("k3", "33" * 32, 5)
    places = await targets(rig, clock)
    await clock.advance(10)
    secrets = {"k1": bytes.fromhex(SECRET), "k2": b"\x22" * 32, "k3": b"\x33" * 32}
    other = mint_token("k3", secrets["k3"], *places["suspended"])
    answers = Counter[tuple[Any, ...]]()
    before, count, sent = await rig.fingerprint(), rejections(), 0
    for name, (execution_id, waitpoint_id) in places.items():
        good = mint_token("k3", secrets["k3"], execution_id, waitpoint_id)
        bad: list[Any] = [
            None,
            "",
            b"bytes",
            5,
            "kid:0",
            good[:-1],
            good + "0",
            good[:-1] + ("0" if good[-1] != "0" else "1"),
            good.upper(),
            good.replace("k3:", "k2:"),
            good.replace("k3:", "nobody:"),
            "k3:" + "0" * 64,
            "x" * 1_000_000,
            "k3:" + "f" * 1_000_000,
            "ключ:" + "ж" * 64,
            "ключ:" + good[3:],
            "\ud800:" + good[3:],
            good.replace("k3:", "k\0:"),
            mint_token("k3", secrets["k3"], execution_id, str(uuid4())),
            mint_token("k3", secrets["k3"], f"{{fp:3}}:{uuid4()}", waitpoint_id),
            # Keys past their grace.
            mint_token("k1", secrets["k1"], execution_id, waitpoint_id),
            mint_token("k2", secrets["k2"], execution_id, waitpoint_id),
            # What a missing key is compared with.
            mint_token("nobody", b"\0" * 32, execution_id, waitpoint_id),
        ]
        if name != "suspended":
            bad.append(other)
        for token in bad:
            one = Signal(execution_id, waitpoint_id, "x", token, source_type="t", source_identity="i")
            error = await refused(rig.engine.deliver_signal(one, idempotency_key="k"))
            assert isinstance(error, Validation)
            answers[type(error), error.kind, error.code, str(error), repr(error), error.detail, error.field] += 1
            sent += 1
    assert len(answers) == 1
    ((_, kind, *_),) = answers
    assert kind == ValidationKind.INVALID_TOKEN
    assert rejections() == count + sent
    assert await rig.fingerprint() == before


async def test_every_place_of_that_matrix_answers_differently_to_a_good_token(rig: Rig, clock: Clock) -> None:
    """Otherwise the test before would prove nothing."""
    codes = Counter[str]()
    for execution_id, waitpoint_id in (await targets(rig, clock)).values():
        token = mint_token("k1", bytes.fromhex(SECRET), execution_id, waitpoint_id)
        one = Signal(execution_id, waitpoint_id, "x", token, source_type="t", source_identity="i")
        try:
            answer = await rig.engine.deliver_signal(one)
        except EngineError as error:
            codes[error.code] += 1
        else:
            assert isinstance(answer, Accepted)
            codes[answer.effect] += 1
    assert codes == {
        "appended_to_waitpoint": 1,
        "buffered_for_pending_waitpoint": 1,
        "state.waitpoint_closed": 6,
        "state.target_not_signalable": 1,
        "not_found": 2,
    }


async def test_a_bad_token_is_refused_before_any_row_is_looked_at(rig: Rig, dsn: str) -> None:
    """I8: nobody can tell by waiting either, though everything but the key store is locked."""
    claim, outcome = await waiting(rig)
    one = signal(claim, outcome.waitpoints[0])
    blocker = await asyncpg.connect(dsn)
    try:
        await blocker.execute("begin")
        tables = await blocker.fetch(
            "select tablename from pg_tables where schemaname = 'public' and tablename <> 'ff_waitpoint_hmac'"
        )
        await blocker.execute(f"lock table {', '.join(row['tablename'] for row in tables)} in access exclusive mode")
        async with asyncio.timeout(4):
            error = await refused(rig.engine.deliver_signal(msgspec.structs.replace(one, token=one.token[:-1])))
        assert error.code == "validation.invalid_token"
    finally:
        await blocker.close()
    assert await send(rig, one) == APPENDED


async def test_every_presented_token_is_verified_in_constant_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """I8: unknown kids and malformed tokens are compared like any other (the comparison itself: core/test_tokens)."""
    verified: list[object] = []
    verify = tokens.verify_token

    def spy(token: object, *rest: Any) -> bool:
        verified.append(token)
        return verify(token, *rest)

    monkeypatch.setattr("ffd.ops.keys.verify_token", spy)
    claim, outcome = await waiting(rig)
    presented: list[Any] = [outcome.waitpoints[0].token, "nobody:" + "0" * 64, "x", None]
    for token in presented:
        try:
            await rig.engine.deliver_signal(msgspec.structs.replace(signal(claim, outcome.waitpoints[0]), token=token))
        except Validation as error:
            assert error.kind == ValidationKind.INVALID_TOKEN
    assert verified == presented


# Nothing is told


class Heard:
    """Everything that a program could have written down, and the secrets that must not be in it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.secrets: set[str] = set()

    def keep(self, *secrets: str) -> None:
        for secret in secrets:
            self.secrets |= {secret, secret.rpartition(":")[2]}

    def hear(self, value: object) -> None:
        """Every usual way to print a value."""
        self.texts += [repr(value), str(value), f"{value}", pprint.pformat(value, width=40), repr([{"v": (value,)}])]
        if hasattr(value, "__rich_repr__"):
            self.texts.append(repr(list(value.__rich_repr__())))

    async def try_(self, call: Any) -> Any:
        """Run a call; its result or everything about its error."""
        try:
            value = await call
        except Exception as error:
            self.texts += traceback.format_exception(error)
            self.hear(error)
            self.hear(error.args)
            self.hear(getattr(error, "context", None))
            return None
        self.hear(value)
        return value


@pytest.fixture
async def loud(open_engine: Callable[..., Any]) -> AsyncIterator[Engine]:
    async with open_engine(lock_timeout_ms=100, pool_max=2) as engine:
        yield engine


async def test_no_token_and_no_secret_reaches_a_log_a_repr_or_an_error(
    rig: Rig,
    loud: Engine,
    dsn: str,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """I8: a whole life with every kind of failure, then a search through all that was said."""
    caplog.set_level(logging.DEBUG)
    heard = Heard()
    engine = loud
    heard.keep(SECRET, "a1" * 32, "a2" * 32, "a3" * 32)
    with structlog.testing.capture_logs() as logs:
        await heard.try_(engine.seed_waitpoint_hmac_secret("k1", "a1" * 32))
        await heard.try_(engine.seed_waitpoint_hmac_secret("k9", "a2" * 32))
        await heard.try_(engine.seed_waitpoint_hmac_secret("k:9", "a2" * 32))
        await heard.try_(engine.seed_waitpoint_hmac_secret("k9", "a2" * 32 + "zz"))
        await heard.try_(engine.rotate_waitpoint_hmac_secret_all("k1", "a3" * 32, 0))
        await heard.try_(engine.rotate_waitpoint_hmac_secret_all("k9", "a3" * 32, -1))
        await heard.try_(engine.list_waitpoint_keys())
        claim = await rig.running()
        pending = await heard.try_(engine.create_waitpoint(claim.handle, "p", expires_in_ms=10**6))
        heard.keep(pending.token)
        await heard.try_(engine.deliver_signal(signal(claim, pending, "no")))
        request = Suspend(
            [UsePending(pending.waitpoint_id), Fresh("a")],
            AllOf((Single("p", ByName("yes")), Count(2, SOURCES, ("a",)))),
            timeout_at_ms=await clock.now_ms() + 10**6,
        )
        await heard.try_(engine.suspend(stale(claim, epoch=1), request))
        await heard.try_(engine.suspend_by_triple(claim.execution_id, LeaseFence("l", 99, "a"), request))
        await heard.try_(engine.suspend(claim.handle, Suspend([Fresh("a", pending.waitpoint_id)], Single("a"))))
        outcome = await heard.try_(engine.suspend(claim.handle, request, idempotency_key="s"))
        await heard.try_(engine.suspend(claim.handle, request, idempotency_key="s"))
        await heard.try_(engine.suspend(claim.handle, request))
        await heard.try_(engine.suspend(outcome.handle, request))
        heard.keep(*(point.token for point in outcome.waitpoints))
        _, a = outcome.waitpoints
        one = signal(claim, a, payload=b"p")
        heard.hear(one)
        heard.hear(request)
        await heard.try_(engine.list_pending_waitpoints(claim.execution_id))
        await heard.try_(engine.list_suspended())
        await heard.try_(engine.describe_execution(claim.execution_id))
        await heard.try_(engine.explain_execution(claim.execution_id))
        for token in (a.token[:-1], a.token.upper(), pending.token, "x" + a.token, a.token * 1000, a.token + "\ud800"):
            bad = msgspec.structs.replace(one, token=token)
            heard.hear(bad)
            await heard.try_(engine.deliver_signal(bad))
        # A token or a secret in the wrong place.
        for field in ("execution_id", "waitpoint_id", "signal_id", "payload"):
            await heard.try_(engine.deliver_signal(msgspec.structs.replace(one, **{field: a.token})))
        await heard.try_(engine.read_waitpoint_token(claim.execution_id, a.token))
        await heard.try_(engine.rotate_waitpoint_hmac_secret_all("k" * 10 + SECRET, SECRET, 0))
        await heard.try_(engine.deliver_signal(one, idempotency_key=""))
        await heard.try_(engine.deliver_signal(one, idempotency_key="once"))
        await heard.try_(engine.deliver_signal(one, idempotency_key="once"))
        await heard.try_(engine.deliver_approval_signal(claim.execution_id, a.waitpoint_id, "approve", actor="x"))
        # The database in trouble: a lock that is not granted, a missing table, a broken constraint.
        blocker = await asyncpg.connect(dsn)
        await blocker.execute("begin")
        await blocker.execute("select * from ff_exec_core for update")
        await heard.try_(engine.deliver_signal(one))
        await blocker.close()
        await rig.sql.execute("alter table ff_signal_event add constraint no check (signal_name <> 'broken') not valid")
        await heard.try_(engine.deliver_signal(signal(claim, pending, "broken")))
        await rig.sql.execute("alter table ff_signal_event rename to ff_signal_event_away")
        await heard.try_(engine.deliver_signal(signal(claim, a)))
        await rig.sql.execute("alter table ff_signal_event_away rename to ff_signal_event")
        await heard.try_(engine.deliver_signal(signal(claim, pending, "yes")))
        await heard.try_(engine.deliver_signal(signal(claim, pending, "late")))
        await heard.try_(engine.observe_signals(outcome.handle))
        resumed = await heard.try_(engine.claim_resumed_execution(claim.execution_id, **OTHER))
        await heard.try_(engine.complete(resumed.handle))
        await heard.try_(engine.deliver_signal(signal(claim, pending, "late")))
        # AlreadySatisfied holds tokens too.
        claim = await rig.running()
        pending = await heard.try_(engine.create_waitpoint(claim.handle, "p", expires_in_ms=10**6))
        heard.keep(pending.token)
        await heard.try_(engine.deliver_signal(signal(claim, pending)))
        done = await heard.try_(engine.suspend(claim.handle, Suspend([UsePending(pending.waitpoint_id)], Single("p"))))
        assert isinstance(done, SuspensionAlreadySatisfied)
        structlog.get_logger().info("the library's caller logs what it has", outcome=repr(outcome), signal=str(one))
    captured = capfd.readouterr()
    said = "\n".join([*heard.texts, repr(logs), caplog.text, captured.out, captured.err])
    assert len(heard.secrets) == 10, "four keys, and three tokens with their MACs"
    assert len(heard.texts) > 300
    assert "invalid_token" in said or "does not authorise" in said
    assert "retry_exhausted" in said or "try again" in said
    leaked = [secret for secret in heard.secrets if secret.lower() in said.lower()]
    assert leaked == []
    raw = [repr(bytes.fromhex(secret))[2:-1] for secret in heard.secrets if len(secret) == 64]
    assert [secret for secret in raw if secret in said] == []


async def test_metrics_hold_no_token(rig: Rig) -> None:
    claim, outcome = await waiting(rig)
    one = signal(claim, outcome.waitpoints[0])
    await refused(rig.engine.deliver_signal(msgspec.structs.replace(one, token=one.token[:-1])))
    page = repr(list(REGISTRY.collect()))
    assert "ffd_token_rejections" in page
    assert one.token.partition(":")[2][:16] not in page
