"""The engine: what applications call. Every method is one short transaction.

Terminology:

* An *execution* is a unit of work on a *lane*. A *worker* claims it, which opens or continues an *attempt* and
  gives the worker a *lease*: the sole right to write to it, until a time on the database clock.
* The *lease epoch* counts owners over the execution's whole life. Every owner's write names its epoch and is
  refused once it has moved (I1), so a worker that was paused, cut off or declared dead can do no harm.
* An *ending* (completed, failed, cancelled, expired, skipped) happens once, and its event commits with it (I2, I3).

After `Unavailable` nothing is known about the call; every call may be repeated. A repeated `complete` or `fail` by
the same owner is answered like the first, a repeated create finds the first by its id or idempotency key.
"""

from __future__ import annotations

from ffd.engine.engine import Engine as Engine
