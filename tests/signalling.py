"""Shorthand for tests about signals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from ffd import (
    Accepted,
    Claim,
    Count,
    CountKind,
    Engine,
    EngineError,
    ExecutionPolicy,
    Fresh,
    Handle,
    LeaseFence,
    Signal,
    SignalEffect,
    Suspend,
    Suspended,
    SuspensionAlreadySatisfied,
)
from ffd.core.conditions import Condition
from ffd.core.handles import read_lease
from ffd.core.ids import parse_execution_id
from tests.support import Rig

SECRET = "9c" * 32
SIGNALS, SOURCES = CountKind.DISTINCT_SIGNALS, CountKind.DISTINCT_SOURCES
APPENDED = SignalEffect.APPENDED_TO_WAITPOINT
SATISFIED = SignalEffect.RESUME_CONDITION_SATISFIED
BUFFERED = SignalEffect.BUFFERED_FOR_PENDING_WAITPOINT
MANY = Count(1000, SIGNALS, ("a",))


def rejections() -> float:
    """How often a token was refused so far."""
    return REGISTRY.get_sample_value("ffd_token_rejections_total") or 0.0


async def waiting(
    rig: Rig, condition: Condition = MANY, *keys: str, policy: ExecutionPolicy | None = None, **suspend: Any
) -> tuple[Claim, Suspended]:
    """A suspended execution and what its suspension returned."""
    claim = await rig.running(policy=policy)
    outcome = await rig.engine.suspend(
        claim.handle, Suspend([Fresh(key) for key in keys or ("a",)], condition, **suspend)
    )
    assert isinstance(outcome, Suspended)
    return claim, outcome


def signal(claim: Claim, point: Any, name: str = "go", source: str = "s", **more: Any) -> Signal:
    """A signal for one of its waitpoints."""
    return Signal(
        claim.execution_id, point.waitpoint_id, name, point.token, source_type="test", source_identity=source, **more
    )


async def send(rig: Rig, one: Signal, **kwargs: Any) -> SignalEffect:
    """Deliver a signal that must be accepted; its effect."""
    answer = await rig.engine.deliver_signal(one, **kwargs)
    assert isinstance(answer, Accepted)
    return answer.effect


async def refused(call: Any) -> EngineError:
    """The error of a call that must be refused."""
    with pytest.raises(EngineError) as info:
        await call
    return info.value


async def member_map(rig: Rig, claim: Claim) -> dict[str, list[dict[str, Any]]]:
    """The stored signals by waitpoint key."""
    text = await rig.sql.fetchval(
        "select member_map from ff_suspension_current where partition_key = $1 and execution_id = $2",
        *parse_execution_id(claim.execution_id),
    )
    found: dict[str, list[dict[str, Any]]] = msgspec.json.decode(text)
    return found


# Both ways to suspend.
Call = Callable[[Engine, Handle, Suspend, str | None], Awaitable[Suspended | SuspensionAlreadySatisfied]]


async def by_triple(
    engine: Engine, handle: Handle, suspend: Suspend, key: str | None
) -> Suspended | SuspensionAlreadySatisfied:
    """Suspend with the parts of the lease."""
    lease = read_lease(handle)
    fence = LeaseFence(lease.lease_id, lease.lease_epoch, lease.attempt_id)
    return await engine.suspend_by_triple(str(lease.key), fence, suspend, idempotency_key=key)


CALLS: dict[str, Call] = {
    "suspend": lambda engine, handle, suspend, key: engine.suspend(handle, suspend, idempotency_key=key),
    "suspend_by_triple": by_triple,
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
