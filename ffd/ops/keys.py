"""Signing keys: one signs, retired ones verify until their grace ends. Secrets never leave this module's callers."""

from __future__ import annotations

import hmac
from typing import Final

from ffd.core.errors import Conflict, ConflictKind, Validation, ValidationKind
from ffd.core.limits import KEY_GRACE_MS_MAX
from ffd.core.suspension import AlreadySeeded, Noop, Rotated, Seeded, WaitpointKey
from ffd.core.tokens import check_kid, check_secret_hex, token_kid, verify_token
from ffd.db.database import Row
from ffd.db.pool import Connection
from ffd.db.statement import Planning, Statement
from ffd.ops.runtime import Runtime

# Rules over the whole set of keys: one change at a time. Readers are not held up.
LOCK_KEYS: Final = Statement("lock_keys", "lock table ff_waitpoint_hmac in share row exclusive mode")

KEYS: Final = Statement(
    "keys",
    "select kid, secret, active, rotated_at_ms, verifies_until_ms, ff_now_ms() as now from ff_waitpoint_hmac",
    Planning.READ,
)

ADD_KEY: Final = Statement(
    "add_key",
    """
    insert into ff_waitpoint_hmac (kid, secret, rotated_at_ms, active) values ($1, $2, ff_now_ms(), true)
    """,
)

# $1 grace_ms. Every retired key keeps its own end: rotating twice within the grace breaks no token.
RETIRE_KEYS: Final = Statement(
    "retire_keys",
    """
    update ff_waitpoint_hmac set active = false, verifies_until_ms = ff_now_ms() + $1 where active returning kid
    """,
)

DROP_KEYS: Final = Statement(
    "drop_keys",
    "delete from ff_waitpoint_hmac where not active and verifies_until_ms <= ff_now_ms() returning kid",
)

VERIFYING_KEY: Final = Statement(
    "verifying_key",
    """
    select secret from ff_waitpoint_hmac
    where kid = $1 and (active or verifies_until_ms is null or verifies_until_ms > ff_now_ms())
    """,
)


async def _locked(connection: Connection) -> dict[str, Row]:
    await connection.execute(LOCK_KEYS.sql)
    return {row["kid"]: row for row in await connection.fetch(KEYS.sql)}


def _same(row: Row, secret: bytes) -> bool:
    return hmac.compare_digest(row["secret"], secret)


async def seed_waitpoint_hmac_secret(runtime: Runtime, kid: str, secret_hex: str) -> Seeded | AlreadySeeded:
    """Store the first signing key."""
    kid = check_kid(kid)
    secret = check_secret_hex(secret_hex)

    async def body(connection: Connection) -> Seeded | AlreadySeeded:
        keys = await _locked(connection)
        if kid in keys:
            return AlreadySeeded(kid, _same(keys[kid], secret))
        active = [row["kid"] for row in keys.values() if row["active"]]
        if active:
            raise Validation(
                ValidationKind.INVALID_INPUT, f"key {active[0]!r} signs already; rotate to replace it", "kid"
            )
        await connection.execute(ADD_KEY.sql, kid, secret)
        return Seeded(kid)

    return await runtime.db.transact("seed_waitpoint_hmac_secret", body)


async def rotate_waitpoint_hmac_secret_all(
    runtime: Runtime, new_kid: str, new_secret_hex: str, grace_ms: int
) -> Rotated | Noop:
    """Sign with a new key; the present one verifies for `grace_ms` more, and keys past their grace are dropped."""
    new_kid = check_kid(new_kid, "new_kid")
    secret = check_secret_hex(new_secret_hex, "new_secret_hex")
    if type(grace_ms) is not int or not 0 <= grace_ms <= KEY_GRACE_MS_MAX:
        raise Validation(ValidationKind.INVALID_GRACE_MS, f"expected an integer in 0..{KEY_GRACE_MS_MAX}", "grace_ms")

    async def body(connection: Connection) -> Rotated | Noop:
        await connection.execute(LOCK_KEYS.sql)
        # First of all: a key past its grace stands for nothing, its name is free again.
        dropped = await connection.fetch(DROP_KEYS.sql)
        keys = await _locked(connection)
        if new_kid in keys:
            if not _same(keys[new_kid], secret):
                raise Conflict(ConflictKind.ROTATION_CONFLICT, f"key {new_kid!r} has another secret", kid=new_kid)
            return Noop(new_kid)
        retired = await connection.fetch(RETIRE_KEYS.sql, grace_ms)
        await connection.execute(ADD_KEY.sql, new_kid, secret)
        return Rotated(retired[0]["kid"] if retired else None, new_kid, len(dropped))

    return await runtime.db.transact("rotate_waitpoint_hmac_secret_all", body)


async def list_waitpoint_keys(runtime: Runtime) -> list[WaitpointKey]:
    """The signing key and those that still verify, newest first; never a secret."""
    rows = await runtime.db.fetch(KEYS)
    alive = [
        row
        for row in rows
        if row["active"] or row["verifies_until_ms"] is None or row["verifies_until_ms"] > row["now"]
    ]
    alive.sort(key=lambda row: (not row["active"], -row["rotated_at_ms"], row["kid"]))
    return [WaitpointKey(row["kid"], row["active"], row["rotated_at_ms"], row["verifies_until_ms"]) for row in alive]


async def is_token_good(runtime: Runtime, token: object, execution_id: str, waitpoint_id: str) -> bool:
    """Whether a token authorises a signal; looks at the key store and nothing else (I8)."""
    kid = token_kid(token)
    row = None if kid is None else await runtime.db.fetchrow(VERIFYING_KEY, kid)
    return verify_token(token, None if row is None else row["secret"], execution_id, waitpoint_id)
