"""Who should own what, without anybody deciding: each thing goes to the node that scores highest for it.

A node that joins takes about 1/n of every other's things, one that leaves gives its own to the rest, and nothing else
moves. Every node that knows the same nodes comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b


@lru_cache(maxsize=16_384)
def _score(node: str, thing: int) -> bytes:
    return blake2b(f"{node}\0{thing}".encode(), digest_size=8).digest()


def choose(thing: int, nodes: Iterable[str]) -> str | None:
    """The node that `thing` belongs to; None when there is none."""
    return max(nodes, key=lambda node: (_score(node, thing), node), default=None)
