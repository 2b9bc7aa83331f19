"""What operators' calls return: cancel, revoke, priority, replay."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from ffd.core.state import PublicState

# The one source of a cancel that needs no epoch. Any other text is somebody who must know the lease.
OPERATOR_OVERRIDE: Final = "operator_override"


class Cancelled(msgspec.Struct, frozen=True):
    """The execution is cancelled, by this call or by an earlier one."""

    execution_id: str
    public_state: PublicState


class Revoked(msgspec.Struct, frozen=True):
    """The lease `lease_id` was taken away; `lease_epoch` is the epoch that fences its owner."""

    lease_id: str
    lease_epoch: int


class SatisfiedReason(StrEnum):
    """Why there was no lease to revoke."""

    NO_ACTIVE_LEASE = "no_active_lease"
    DIFFERENT_WORKER_INSTANCE_ID = "different_worker_instance_id"
    LEASE_ID_MISMATCH = "lease_id_mismatch"
    EPOCH_MOVED = "epoch_moved"


class AlreadySatisfied(msgspec.Struct, frozen=True):
    """The lease in question is gone already; nothing was changed."""

    reason: SatisfiedReason


class PriorityChanged(msgspec.Struct, frozen=True):
    """The priority before and after, both within 0..9000."""

    old_priority: int
    new_priority: int


class Replayed(msgspec.Struct, frozen=True):
    """The execution runs again: `waiting`, or `waiting_children` when its dependencies are open."""

    public_state: PublicState
