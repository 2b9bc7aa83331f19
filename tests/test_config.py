"""Settings: search order, environment, secrets from files, bounds, and texts without passwords."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from ffd import config
from ffd.config import ConfigError, DatabaseSettings, Settings, describe_target, dsn_problem, load, redact_dsn
from ffd.core.schedule import RECONCILERS

EXAMPLE = Path(__file__).parent.parent / "ffd.toml.example"
DSN = "postgresql://ffd:hunter2@db.example:5433/app"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration of this machine takes part."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "SEARCH_PATHS", (Path("ffd.toml"), tmp_path / "etc" / "ffd.toml"))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def problems(path: Path | None, environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, environ)
    return str(caught.value)


# The example


def test_the_example_file_is_exactly_the_defaults() -> None:
    shown = dict(config._tables_of(tomllib.loads(EXAMPLE.read_text())))
    assert load(EXAMPLE, {}) == Settings()
    assert shown == {
        name: {key: value for key, value in msgspec.structs.asdict(table).items() if value is not None}
        for name, table in Settings().tables().items()
    }


def test_the_example_file_shows_every_key_with_an_explanation() -> None:
    lines = EXAMPLE.read_text().splitlines()
    for table, defaults in Settings().tables().items():
        start = lines.index(f"[{table}]")
        section = lines[start + 1 :]
        for key, value in msgspec.structs.asdict(defaults).items():
            mark = "# " if value is None else ""
            found = [i for i, line in enumerate(section) if line.startswith(f"{mark}{key} = ")]
            assert found, f"{table}.{key} is missing"
            # The keys of the reconcilers are explained once, where the first of them stands.
            if not table.startswith("reconcilers.") or table == "reconcilers.lease_expiry":
                assert re.match(r"# \S", section[found[0] - 1]), f"{table}.{key} is not explained"


def test_commented_keys_of_the_example_are_valid_too(tmp_path: Path) -> None:
    text = re.sub(r"^# (\w+ = )", r"\1", EXAMPLE.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^\w+_file = .*$", "", text, flags=re.MULTILINE)
    assert load(write(tmp_path / "all.toml", text), {}).database.listen_dsn is not None


def test_every_reconciler_has_a_table_and_a_module() -> None:
    modules = {path.stem for path in (EXAMPLE.parent / "ffd" / "reconcilers").glob("*.py")}
    assert set(RECONCILERS) <= modules
    assert {name.partition(".")[2] for name in Settings().tables() if name.startswith("reconcilers.")} == set(
        RECONCILERS
    )


def test_a_table_of_tables_can_be_set_from_the_file_and_from_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path / "f.toml", "[reconcilers.lease_expiry]\ninterval_ms = 200\nbatch_rows = 10\n")
    found = load(path, {"FFD_RECONCILERS__LEASE_EXPIRY__INTERVAL_MS": "300"}).reconcilers
    assert (found["lease_expiry"].interval_ms, found["lease_expiry"].batch_rows) == (300, 10)
    assert found["retention"] == Settings().reconcilers["retention"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            "[reconcilers.lease_expire]",
            "reconcilers.lease_expire",
        ),
        ("[reconcilers]\nenabled = true", "reconcilers.enabled"),
        ("reconcilers = 1", "reconcilers"),
        ("[reconcilers.retention]\nbatch_rows = 0", "reconcilers.retention.batch_rows"),
        ("[http]\nbind = 'nowhere'", "http.bind"),
        ("[node]\nname = 1", "node.name"),
    ],
)
def test_mistakes_in_the_daemons_tables_are_named(tmp_path: Path, text: str, names: str) -> None:
    assert problems(write(tmp_path / "f.toml", text), {}).startswith(f"configuration: {names} (")


def test_an_interval_of_zero_switches_a_reconciler_off() -> None:
    """V-132."""
    settings = load(None, {"FFD_RECONCILERS__RETENTION__INTERVAL_MS": "0"}).reconcilers
    assert [name for name, each in settings.items() if not each.is_on] == ["retention"]


# Where settings come from


def test_no_file_and_no_environment_give_the_defaults() -> None:
    assert load(None, {}) == Settings()
    assert load(None, {"PGHOST": "db", "FFD_CONFIG": ""}).database.dsn is None


def test_files_are_searched_in_order(tmp_path: Path) -> None:
    def pool_max(path: Path | None, environ: dict[str, str]) -> int:
        return load(path, environ).database.pool_max

    write(tmp_path / "etc" / "ffd.toml", "[database]\npool_max = 21")
    assert pool_max(None, {}) == 21
    write(tmp_path / "ffd.toml", "[database]\npool_max = 22")
    assert pool_max(None, {}) == 22
    named = write(tmp_path / "named.toml", "[database]\npool_max = 23")
    assert pool_max(None, {"FFD_CONFIG": str(named)}) == 23
    given = write(tmp_path / "given.toml", "[database]\npool_max = 24")
    assert pool_max(given, {"FFD_CONFIG": str(named)}) == 24


def test_a_file_that_was_asked_for_must_exist(tmp_path: Path) -> None:
    assert "absent.toml" in problems(tmp_path / "absent.toml", {})
    assert "absent.toml" in problems(None, {"FFD_CONFIG": "absent.toml"})


@pytest.mark.parametrize(
    "content",
    [b"[database\n", b"\xff\xfe", b"#" * (config.CONFIG_BYTES_MAX + 1)],
    ids=["syntax", "encoding", "size"],
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    assert "bad.toml" in problems(path, {})


def test_the_environment_wins_and_is_parsed_by_the_type_of_the_key(tmp_path: Path) -> None:
    write(tmp_path / "ffd.toml", '[database]\npool_max = 5\nlock_timeout_ms = 7\n[outbox]\nnotify = "off"')
    settings = load(
        None,
        {
            "FFD_DATABASE__DSN": DSN,
            "FFD_DATABASE__POOL_MAX": "50",
            "FFD_DATABASE__STATEMENT_CACHE": "false",
            "FFD_LOG__FORMAT": "json",
        },
    )
    assert settings.database.dsn == DSN
    assert settings.database.pool_max == 50
    assert settings.database.statement_cache is False
    assert settings.database.lock_timeout_ms == 7
    assert settings.outbox.notify == "off"
    assert settings.log.format == "json"


def test_variables_that_name_no_table_are_left_alone() -> None:
    assert load(None, {"FFD_PORT": "tcp://10.0.0.1", "FFD_TRACEBACK": "1", "XFFD_LOG__X": "1"}) == Settings()


# Secrets from files


def test_a_dsn_is_read_from_its_file_beside_the_config(tmp_path: Path) -> None:
    write(tmp_path / "conf" / "secret", f"{DSN}\n")
    path = write(tmp_path / "conf" / "ffd.toml", '[database]\ndsn_file = "secret"\nlisten_dsn_file = "secret"')
    database = load(path, {}).database
    assert (database.dsn, database.listen_dsn) == (DSN, DSN)


def test_either_spelling_in_the_environment_replaces_either_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "other", "postgresql://other/db")
    write(tmp_path / "ffd.toml", '[database]\ndsn_file = "absent"')
    assert load(None, {"FFD_DATABASE__DSN": DSN}).database == DatabaseSettings(dsn=DSN)
    write(tmp_path / "ffd.toml", f'[database]\ndsn = "{DSN}"')
    assert load(None, {"FFD_DATABASE__DSN_FILE": "other"}).database.dsn == "postgresql://other/db"


def test_both_spellings_in_one_place_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "secret", DSN)
    text = problems(None, {"FFD_DATABASE__DSN": DSN, "FFD_DATABASE__DSN_FILE": "secret"})
    assert "database.dsn and database.dsn_file" in text


@pytest.mark.parametrize("content", [None, b"", b"host=db password=hunter2", b"\xffhunter2"])
def test_a_useless_secret_file_is_refused_without_its_content(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    text = problems(None, {"FFD_DATABASE__DSN_FILE": "secret"})
    assert "database.dsn_file (FFD_DATABASE__DSN_FILE)" in text
    assert "hunter2" not in text


# Bounds


@pytest.mark.parametrize(
    ("key", "low", "high"),
    [
        ("database.pool_min", 0, 1000),
        ("database.pool_max", 1, 1000),
        ("database.lock_timeout_ms", 1, 600_000),
        ("database.statement_timeout_ms", 1, 3_600_000),
        ("outbox.poll_interval_ms", 10, 60_000),
    ],
)
def test_numbers_are_bounded_and_the_error_names_key_and_bound(key: str, low: int, high: int) -> None:
    table, name = key.split(".")
    variable = f"FFD_{table}__{name}".upper()
    room = {"FFD_DATABASE__POOL_MAX": "1000"} if name == "pool_min" else {}
    room |= {"FFD_DATABASE__POOL_MIN": "0"} if name == "pool_max" else {}
    for value in (low, high):
        assert getattr(getattr(load(None, {**room, variable: str(value)}), table), name) == value
    for wrong in (str(low - 1), str(high + 1), "many", ""):
        text = problems(None, {**room, variable: wrong})
        assert key in text
        assert f"from {low} to {high}" in text


def test_a_value_of_the_wrong_type_in_the_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "ffd.toml", '[database]\npool_max = "10"\nstatement_cache = 1\ndsn = 5')
    text = problems(path, {})
    assert "database.pool_max (" in text
    assert "database.statement_cache (" in text
    assert "must be true or false" in text
    assert "database.dsn (" in text


def test_pool_min_must_not_exceed_pool_max() -> None:
    text = problems(None, {"FFD_DATABASE__POOL_MIN": "11"})
    assert "database.pool_min: 11 is more than database.pool_max = 10" in text


def test_all_problems_come_at_once_each_with_its_origin(tmp_path: Path) -> None:
    write(
        tmp_path / "ffd.toml",
        'log = 1\n[database]\npool_mx = 3\npool_max = 0\n[outbox]\nnotify = "loud"\n[databse]\nx = 1',
    )
    with pytest.raises(ConfigError) as caught:
        load(None, {"FFD_LOG__LEVEL": "chatty", "FFD_NOD__NAME": "a", "FFD_DATABASE__A__B": "1"})
    text = str(caught.value)
    assert len(caught.value.problems) == 8
    assert caught.value.code == "config"
    for part in (
        "log (ffd.toml): must be a table",
        "database.pool_mx (ffd.toml): unknown key; did you mean pool_max?",
        "database.pool_max (ffd.toml): must be a whole number from 1 to 1000, not 0",
        "outbox.notify (ffd.toml): must be 'doorbell' or 'off', not 'loud'",
        "databse (ffd.toml): unknown table; did you mean database?",
        "log.level (FFD_LOG__LEVEL): must be 'debug', 'info', 'warning' or 'error', not 'chatty'",
        "nod (FFD_NOD__NAME): unknown table; did you mean node?",
        "database.a (FFD_DATABASE__A__B): unknown table; did you mean database?",
    ):
        assert part in text


# No password in any text


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        (DSN, "postgresql://ffd:***@db.example:5433/app"),
        ("postgres://u:hunter2@%2Frun%2Fpg/db?a=b", "postgres://u:***@%2Frun%2Fpg/db?a=b"),
        ("postgresql:///db?user=a@b&password=hunter2", "postgresql:///db?user=a@b&password=***"),
        (
            "postgresql:///db?ssl%70assword=hunter2&PASSWORD=hunter2",
            "postgresql:///db?ssl%70assword=***&PASSWORD=***",
        ),
        ("postgresql://u@[::1]:5433,other/db", "postgresql://u@[::1]:5433,other/db"),
        ("postgresql://u:hun/ter2@host/db", "***"),
        ("postgresql://u:hunt@er2@host/db", "***"),
        ("postgresql://u:12#hunter2@host/db", "***"),
        ("postgresql://u:12?hunter2@host/db", "***"),
        ("postgresql://u:hunter2", "***"),
        ("host=db password=hunter2", "***"),
    ],
)
def test_redacting_leaves_no_password(dsn: str, shown: str) -> None:
    assert redact_dsn(dsn) == shown
    assert (dsn_problem(dsn) is not None) == (shown == "***")


def test_settings_print_without_passwords() -> None:
    settings = Settings(database=DatabaseSettings(dsn=DSN, listen_dsn=DSN))
    for text in (repr(settings), str(settings), f"{settings}", repr(settings.database.__rich_repr__())):
        assert "hunter2" not in text
    assert "ffd:***@db.example" in repr(settings)


@pytest.mark.parametrize("dsn", ["postgresql://u:hunter2@h:port/db", "postgresql://[hunter2/db", "hunter2", ""])
def test_a_malformed_dsn_is_refused_without_repeating_it(dsn: str) -> None:
    text = problems(None, {"FFD_DATABASE__DSN": dsn})
    assert "database.dsn (FFD_DATABASE__DSN)" in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("dsn", "environ", "shown"),
    [
        (DSN, {}, "db.example:5433 (database app, user ffd)"),
        ("postgresql://a@h1,h2:6000/db", {"PGPORT": "7000"}, "h1:7000,h2:6000 (database db, user a)"),
        ("postgresql:///?host=/run/pg&user=u", {}, "/run/pg:5432 (database u, user u)"),
        (None, {"PGHOST": "h", "PGPORT": "1", "PGDATABASE": "d", "PGUSER": "u"}, "h:1 (database d, user u)"),
        (None, {"PGUSER": "u", "PGPASSWORD": "hunter2"}, "localhost:5432 (database u, user u)"),
    ],
)
def test_the_target_is_described_for_error_texts(dsn: str | None, environ: dict[str, str], shown: str) -> None:
    assert describe_target(dsn, environ) == shown
