"""What holds for every call of an owner: stale fence, wrong state, expired, not found, malformed.

Conformance C-025, C-142, C-144, C-145, C-158…C-160, C-175…C-178, V-058, V-059: there is no call without a fence, so
"missing fence" is a handle that is not one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from ffd import (
    Backend,
    Contention,
    ContentionKind,
    Engine,
    EngineError,
    FailureClass,
    Handle,
    HandleKind,
    NotFound,
    State,
    StateKind,
    Validation,
    ValidationKind,
)
from ffd.core.handles import Lease
from tests.support import Clock, Rig, stale

pytestmark = pytest.mark.anyio

Call = Callable[[Engine, Handle], Awaitable[Any]]


async def _raise_first(answers: Awaitable[list[Any]]) -> Any:
    (answer,) = await answers
    if isinstance(answer, EngineError):
        raise answer
    return answer


CALLS: dict[str, Call] = {
    "renew": lambda engine, handle: engine.renew(handle),
    "renew_many": lambda engine, handle: _raise_first(engine.renew_many([handle])),
    "progress": lambda engine, handle: engine.progress(handle, percent=5),
    "complete": lambda engine, handle: engine.complete(handle, b"r"),
    "complete_many": lambda engine, handle: _raise_first(engine.complete_many([(handle, b"r")])),
    "fail": lambda engine, handle: engine.fail(handle, "why", FailureClass.TRANSIENT),
    "release": lambda engine, handle: engine.release(handle),
    "delay": lambda engine, handle: engine.delay(handle, 2**50),
    "wait_children": lambda engine, handle: engine.wait_children(handle),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


async def _refused(rig: Rig, call: Call, handle: Handle) -> EngineError:
    before = await rig.fingerprint()
    with pytest.raises(EngineError) as refused:
        await call(rig.engine, handle)
    assert await rig.fingerprint() == before, "a refused call changed something"
    return refused.value


@calls
async def test_a_moved_epoch_or_attempt_is_a_lease_conflict(rig: Rig, call: Call) -> None:
    claim = await rig.running()
    for handle in (stale(claim, epoch=1), stale(claim, epoch=-1), stale(claim, attempt=1)):
        error = await _refused(rig, call, handle)
        assert isinstance(error, Contention)
        assert error.kind == ContentionKind.LEASE_CONFLICT
        assert error.code == "contention.lease_conflict"
        assert not error.is_retryable


@calls
async def test_an_execution_that_is_not_running_refuses(rig: Rig, call: Call) -> None:
    claim = await rig.running()
    await rig.engine.release(claim.handle)
    error = await _refused(rig, call, claim.handle)
    assert isinstance(error, Contention)
    assert error.kind == ContentionKind.EXECUTION_NOT_ACTIVE
    assert error.context["lifecycle_phase"] == "runnable"
    assert not error.is_retryable


@calls
async def test_an_ended_execution_refuses_and_tells_how_it_ended(rig: Rig, call: Call) -> None:
    """V-047: outcome, epoch, phase and attempt, enough to recognise one's own earlier success."""
    claim = await rig.running()
    await rig.sql.execute(
        "update ff_exec_core set lifecycle_phase = 'terminal', ownership_state = 'unowned', public_state = 'expired',"
        " attempt_state = 'attempt_terminal', terminal_at_ms = 1"
    )
    await rig.sql.execute("update ff_attempt set outcome = 'expired', lease_expires_at_ms = null")
    error = await _refused(rig, call, claim.handle)
    assert isinstance(error, Contention)
    assert error.kind == ContentionKind.EXECUTION_NOT_ACTIVE
    assert error.context["terminal_outcome"] == "expired"
    assert error.context["lifecycle_phase"] == "terminal"
    assert error.context["lease_epoch"] == claim.lease_epoch
    assert error.context["attempt_id"] == claim.attempt_id


@calls
async def test_an_expired_lease_is_refused_before_anybody_swept_it(rig: Rig, clock: Clock, call: Call) -> None:
    claim = await rig.running()
    await clock.advance(30_000)
    error = await _refused(rig, call, claim.handle)
    assert isinstance(error, State)
    assert error.kind == StateKind.LEASE_EXPIRED


@calls
async def test_an_unknown_execution_is_not_found(rig: Rig, call: Call) -> None:
    handle = Handle.of_lease(HandleKind.FRESH, Lease(7, uuid4(), 0, 1, 1000, "default", "w-1"))
    error = await _refused(rig, call, handle)
    assert isinstance(error, NotFound)
    assert error.entity == "execution"


@calls
async def test_a_never_claimed_execution_has_no_such_attempt(rig: Rig, call: Call) -> None:
    claim = await rig.running()
    await rig.sql.execute("delete from ff_attempt")
    error = await _refused(rig, call, claim.handle)
    assert isinstance(error, NotFound)
    assert error.entity == "attempt"


@calls
async def test_another_backends_handle_is_refused(rig: Rig, call: Call) -> None:
    """C-297, V-059."""
    claim = await rig.running()
    error = await _refused(rig, call, Handle(Backend.VALKEY, HandleKind.FRESH, claim.handle.opaque))
    assert isinstance(error, Validation)
    assert error.kind == ValidationKind.HANDLE_FROM_OTHER_BACKEND


@calls
@pytest.mark.parametrize("handle", [None, b"bytes", "text", Handle(Backend.POSTGRES, HandleKind.FRESH, b"garbage")])
async def test_what_is_no_handle_is_corruption(rig: Rig, call: Call, handle: Any) -> None:
    """C-142, C-158, C-175."""
    error = await _refused(rig, call, handle)
    assert isinstance(error, Validation)
    assert error.kind == ValidationKind.CORRUPTION
    assert error.field == "handle"


@calls
async def test_a_handle_works_after_a_trip_through_its_bytes(rig: Rig, call: Call) -> None:
    claim = await rig.running()
    if call is CALLS["wait_children"]:
        await rig.sql.execute("update ff_exec_core set flow_id = gen_random_uuid()")
    await call(rig.engine, Handle.decode(claim.handle.encode()))


async def test_refusals_are_counted_by_operation(rig: Rig) -> None:
    from ffd.telemetry.metrics import FENCE_REJECTIONS

    counter = FENCE_REJECTIONS.labels("renew")
    before = counter._value.get()
    claim = await rig.running()
    await _refused(rig, CALLS["renew"], stale(claim, epoch=1))
    assert counter._value.get() == before + 1
