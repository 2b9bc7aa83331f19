"""The command: choose benchmarks, run them on one server, print the table, exit 1 when a bound is missed."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import uvloop

from benchmarks import batches, bulk_create, claim_complete, claim_latency, flows, reconcilers, renew, signals, wal
from benchmarks.bench import DURABLE_SETTINGS, Bench
from benchmarks.report import Finding, table
from ffd.dev.postgres import EmbeddedPostgres

BENCHMARKS: Final[dict[str, Callable[[Bench], Awaitable[list[Finding]]]]] = {
    "claim_complete": claim_complete.run,
    "batches": batches.run,
    "bulk_create": bulk_create.run,
    "claim_latency": claim_latency.run,
    "wal": wal.run,
    "renew": renew.run,
    "signals": signals.run,
    "flows": flows.run,
    "reconcilers": reconcilers.run,
}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones: {', '.join(BENCHMARKS)}; all without")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: shows that everything runs; bounds are not enforced"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to FILE as well")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    return arguments


async def _run(bench: Bench, names: Sequence[str]) -> tuple[dict[str, str], dict[str, list[Finding]]]:
    task = asyncio.current_task()
    assert task is not None
    # A cancelled run stops its server and removes its data, a killed one does not.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    settings = await bench.open()
    bench.progress(_in_words(settings))
    found = {}
    for name in names:
        found[name] = await BENCHMARKS[name](bench)
        for finding in found[name]:
            bench.progress(f"{name}: {' | '.join(cell for cell in finding.cells() if cell)}")
    return settings, found


def _in_words(settings: dict[str, str]) -> str:
    version, *others = settings.items()
    return f"PostgreSQL {version[1]}, {', '.join(f'{name} {value}' for name, value in others)}"


def _document(settings: dict[str, str], found: dict[str, list[Finding]], *, is_quick: bool) -> dict[str, Any]:
    benchmarks = {name: [finding.as_json() for finding in findings] for name, findings in found.items()}
    return {"is_quick": is_quick, "settings": settings, "benchmarks": benchmarks}


def _conclude(findings: Sequence[Finding], *, is_quick: bool) -> int:
    """Print the table and what follows from it; the exit status."""
    print(table(findings))
    missed = [finding.what for finding in findings if finding.is_missed]
    if missed:
        print(f"\nMissed: {'; '.join(missed)}{' (not enforced at quick sizes)' if is_quick else ''}")
    return 1 if missed and not is_quick else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    arguments = _arguments(argv)
    names = list(dict.fromkeys(arguments.names)) or list(BENCHMARKS)
    try:
        with EmbeddedPostgres.temporary(settings=DURABLE_SETTINGS) as server:
            bench = Bench(server, is_quick=arguments.quick)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                settings, found = runner.run(_run(bench, names))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        return 130
    if arguments.json is not None:
        document = _document(settings, found, is_quick=arguments.quick)
        arguments.json.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    bench.progress("done")
    print(f"\n{_in_words(settings)}")
    print(f"Median of {bench.rounds} rounds, run in turns; a ratio is the median of the rounds' ratios.\n")
    return _conclude([finding for each in found.values() for finding in each], is_quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
