"""`ffd migrate`: the migration runner at the command line."""

from __future__ import annotations

import click

from ffd.cli.output import EXIT_MIGRATION, EXIT_OK, Command, Invocation, run_async
from ffd.db import migrations
from ffd.db.migration_files import discover
from ffd.db.migrations import Progress, ProgressStep, SchemaStatus


@click.command(cls=Command)
@click.option("--check", "is_check", is_flag=True, help="Change nothing; exit 3 when the schema is behind.")
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Change nothing; print what would be applied.")
@click.pass_obj
def migrate(invocation: Invocation, is_check: bool, is_dry_run: bool) -> int:
    """Bring the database to the schema this version needs.

    Applies the pending migrations in order, each in one transaction. Safe to run while ffd works and from
    several places at once: one applies, the others wait for it. Connect to PostgreSQL directly, not through
    PgBouncer.

    \b
    Examples:
      ffd migrate
      ffd migrate --dry-run
      ffd migrate --check || echo "not yet"
      FFD_DATABASE__DSN=postgresql://ffd@db.example/ffd ffd migrate --json

    Exits 3 when a migration fails or when the database is newer than this version, 4 when the database cannot
    be reached.
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    if is_check and is_dry_run:
        raise click.UsageError("--check and --dry-run exclude each other.")
    dsn = invocation.settings().database.dsn
    if is_check or is_dry_run:
        return _tell_status(invocation, run_async(lambda: _status(dsn)), is_check=is_check)
    _migrate(invocation, dsn)
    return EXIT_OK


async def _status(dsn: str | None) -> SchemaStatus:
    async with migrations.session(dsn) as conn:
        return await migrations.status(conn)


def _tell_status(invocation: Invocation, found: SchemaStatus, *, is_check: bool) -> int:
    for migration in found.pending:
        invocation.say(f"{'pending' if is_check else 'would apply'} {migration.label}")
    if not found.pending:
        invocation.say(f"nothing to do: schema is at version {found.version}")
    elif is_check:
        invocation.say(f"schema is at version {found.version}, version {found.target_version} is needed")
    invocation.emit(
        {
            "version": found.version,
            "target_version": found.target_version,
            "pending": [migration.label for migration in found.pending],
        }
    )
    return EXIT_MIGRATION if is_check and found.pending else EXIT_OK


def _migrate(invocation: Invocation, dsn: str | None) -> None:
    applied: list[dict[str, object]] = []

    def on_progress(progress: Progress) -> None:
        invocation.say(progress_line(progress))
        if progress.step is ProgressStep.APPLIED and progress.migration is not None:
            applied.append({"name": progress.migration.label, "seconds": round(progress.elapsed_s, 3)})

    run_async(lambda: migrations.migrate(dsn, on_progress=on_progress))
    version = discover()[-1].version
    invocation.say(f"{'' if applied else 'nothing to do: '}schema is at version {version}")
    invocation.emit({"version": version, "applied": applied})


def progress_line(progress: Progress) -> str:
    """Put a step of the runner into words."""
    name = "" if progress.migration is None else progress.migration.label
    match progress.step:
        case ProgressStep.APPLIED:
            return f"applied {name} in {progress.elapsed_s:.2f} s"
        case ProgressStep.RETRYING:
            return f"trying {name} again: {progress.detail}"
        case ProgressStep.WAITING:
            return f"waiting for another migration: {progress.detail}"
