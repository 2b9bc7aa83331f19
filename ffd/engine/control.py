"""What operators call to take work away, stop it, move it up and run it again."""

from __future__ import annotations

from ffd.core.control import OPERATOR_OVERRIDE, AlreadySatisfied, Cancelled, PriorityChanged, Replayed, Revoked
from ffd.engine.calls import Calls
from ffd.ops import cancel as cancel_op
from ffd.ops import priority as priority_op
from ffd.ops import replay as replay_op
from ffd.ops import revoke as revoke_op


class ControlCalls(Calls):
    """Operator control. Each call keeps who, when, why and what was before in an operator event."""

    async def cancel_execution(
        self,
        execution_id: str,
        *,
        reason: str,
        actor: str = "",
        source: str = OPERATOR_OVERRIDE,
        lease_epoch: int | None = None,
    ) -> Cancelled:
        """End an execution from any state but an ended one; its owner is fenced, what it waited for is closed.

        A second call is answered like the first. A `source` other than the operator's must present the
        `lease_epoch` it knows: missing is a `Validation`, another one `State(STALE_LEASE)`. An execution that
        ended otherwise cannot be cancelled: `Validation`.
        """
        with self._timed("cancel_execution"):
            return await cancel_op.cancel_execution(
                self._runtime, execution_id, reason=reason, actor=actor, source=source, lease_epoch=lease_epoch
            )

    async def revoke_lease(
        self,
        execution_id: str,
        *,
        reason: str,
        actor: str = "",
        worker_instance_id: str = "",
        expected_lease_id: str | None = None,
    ) -> Revoked | AlreadySatisfied:
        """Take the lease that stands now away; the work is claimable at once and its owner is fenced.

        With `worker_instance_id` or `expected_lease_id` only that lease is taken. When it is gone already,
        `AlreadySatisfied` says how.
        """
        with self._timed("revoke_lease"):
            return await revoke_op.revoke_lease(
                self._runtime,
                execution_id,
                reason=reason,
                actor=actor,
                worker_instance_id=worker_instance_id,
                expected_lease_id=expected_lease_id,
            )

    async def change_priority(
        self, execution_id: str, new_priority: int, *, reason: str = "", actor: str = ""
    ) -> PriorityChanged:
        """Move claimable work up or down; clamped to 0..9000. `Contention(EXECUTION_NOT_ELIGIBLE)` otherwise."""
        with self._timed("change_priority"):
            return await priority_op.change_priority(
                self._runtime, execution_id, new_priority, reason=reason, actor=actor
            )

    async def replay_execution(self, execution_id: str, *, reason: str = "", actor: str = "") -> Replayed:
        """Run an ended execution again, with its payload and policy, without its deadline, result and signals.

        The attempt index stays, the epoch rises. A skipped member of a flow waits for its dependencies again.
        `State(EXECUTION_NOT_TERMINAL)`, `State(MAX_REPLAYS_EXHAUSTED)` by the policy's limit, and
        `State(REPLAY_NOT_ALLOWED)` in a cancelled flow.
        """
        with self._timed("replay_execution"):
            return await replay_op.replay_execution(self._runtime, execution_id, reason=reason, actor=actor)
