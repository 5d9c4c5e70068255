"""Opens the storage of a study that several processes share: SQLite, PostgreSQL, MySQL, or a journal file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mecha_exp.app.search.locks import FileLocks, Locks, MySQLLocks, PostgresLocks
from mecha_exp.app.search.shared_study import SharedStudy
from mecha_exp.app.search.space import Space
from mecha_exp.documents import parse_json, typed
from mecha_exp.errors import ConfigError, first_line
from mecha_exp.system.optuna_log import quiet_optuna

if TYPE_CHECKING:
    import optuna

_IDENTITY = "mecha_exp_identity"
_KINDS = (
    "SQLite (sqlite:///FILE), PostgreSQL (postgresql+psycopg://...), MySQL (mysql+pymysql://...), or a "
    "journal file (a path)"
)
_SERVERS = {"postgresql": PostgresLocks, "mysql": MySQLLocks}
"""The locks of databases that are servers, by the names that SQLAlchemy has for them."""
_OF_POSTGRES = {
    "connect_timeout": 20,
    "keepalives_idle": 60,
    "keepalives_interval": 15,
    "keepalives_count": 4,
    "tcp_user_timeout": 120_000,
}
_OF_MYSQL = {"connect_timeout": 20, "read_timeout": 600, "write_timeout": 600}
_LIMITS: Mapping[str, dict[str, int]] = {
    **dict.fromkeys(("psycopg", "psycopg2"), _OF_POSTGRES),
    **dict.fromkeys(("pymysql", "mysqldb"), _OF_MYSQL),
}
"""How long drivers wait for a server that is gone, in seconds, one in milliseconds; else for ever."""
_PACKAGES = {"psycopg": "'psycopg[binary]'", "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}
"""The packages of drivers that are called otherwise than their modules, or need a compiler without this."""


def open_shared(
    url: str, name: str, space: Space, directions: Sequence[str], identity: Mapping[str, object]
) -> SharedStudy:
    """Open or make the study of a name in a storage.

    Args:
        url: of a database, as SQLAlchemy has them, or the path of a journal file.
        name: of the study.
        space: what is searched.
        directions: `maximize` or `minimize`, for each objective.
        identity: what two searches of one study have in common beside their space, as JSON has it, in words.

    Raises:
        ConfigError: it cannot be reached, is of another kind, or has another study of that name.
    """
    shown = _without_password(url)
    described = {"space": space.description, "direction": list(directions), **identity}
    try:
        make, locks, mend = _parts(url, name)
        with quiet_optuna(), locks.exclusive():
            mend()
            study, stored = _opened(make(), name, directions, json.dumps(described))
        locks.leave()
    except ModuleNotFoundError as error:  # SQLAlchemy's driver of the database
        package = _PACKAGES.get(str(error.name), error.name)
        how = f"it needs {error.name}, which is not installed: pip install {package}"
        raise ConfigError(f"sweep.storage={shown} cannot be reached: {how}") from None
    except Exception as error:  # of a database, of any kind
        raise ConfigError(f"sweep.storage={shown} cannot be reached: {first_line(error)}") from None
    if stored != json.dumps(described):
        raise ConfigError(
            f"sweep.storage={shown}: its study '{name}' searches another {_differing(stored, described)}. "
            "Give this search another name with name=..., or choose another storage."
        )
    return SharedStudy(space, study, locks, shown, mend)


def _opened(
    storage: optuna.storages.BaseStorage, name: str, directions: Sequence[str], identity: str
) -> tuple[optuna.Study, str | None]:
    """The study of a name, made if there is none, and what it says of itself."""
    import optuna

    names = [study.study_name for study in storage.get_all_studies()]
    if name in names:
        study = optuna.load_study(study_name=name, storage=storage)
        stored = study.user_attrs.get(_IDENTITY)
        if stored is not None or study.get_trials(deepcopy=False):
            return study, stored
    study = optuna.create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)
    if (existing := storage.get_study_name_from_id(study._study_id)) != name:  # MySQL takes One for one
        raise ValueError(
            f"it takes the study '{existing}' for '{name}'. Give this search another name, name=..."
        )
    study.set_user_attr(_IDENTITY, identity)
    return study, identity


def _differing(known: str | None, described: Mapping[str, object]) -> str:
    """The differences between a study and a search, in words."""
    before = typed(parse_json(known), dict[str, Any]) if known else {}
    differing = [key for key, value in described.items() if before.get(key) != value]
    return " and another ".join(differing[:2])


def _parts(
    url: str, name: str
) -> tuple[Callable[[], optuna.storages.BaseStorage], Locks, Callable[[], None]]:
    """A function that makes the storage, its locks, and a function that mends it after a kill."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    if "://" not in url:
        path = _in_a_folder(Path(url))
        make = lambda: optuna.storages.JournalStorage(JournalFileBackend(str(path)))  # noqa: E731
        return make, FileLocks(path), lambda: _mend_journal(path)
    import sqlalchemy

    address = sqlalchemy.make_url(url)
    kind = address.get_backend_name()
    if kind in _SERVERS:
        if address.drivername == "mysql":  # for which SQLAlchemy would take a driver that is to be compiled
            address = address.set(drivername="mysql+pymysql")
        limits = _LIMITS.get(address.get_driver_name(), {})
        engine = sqlalchemy.create_engine(address, poolclass=sqlalchemy.NullPool, connect_args=limits)
        full = address.render_as_string(hide_password=False)
        make = lambda: optuna.storages.RDBStorage(full, engine_kwargs={"connect_args": limits})  # noqa: E731
        return make, _SERVERS[kind](engine, name), lambda: None
    if kind != "sqlite" or not address.database or address.database == ":memory:":
        raise ValueError(f"a study is kept in {_KINDS}")
    path = _in_a_folder(Path(address.database))
    return lambda: optuna.storages.RDBStorage(f"sqlite:///{path}"), FileLocks(path), lambda: None


def _in_a_folder(path: Path) -> Path:
    """A path as an absolute one, whose folder exists."""
    if not path.absolute().parent.is_dir():
        raise OSError(f"there is no folder {path.absolute().parent}")
    return path.absolute()


def _mend_journal(path: Path) -> None:
    """Remove what a kill leaves of a write: Optuna's own lock, and the beginning of a line.

    The caller holds the lock under which alone this process writes.
    """
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def _without_password(url: str) -> str:
    """An address as it is shown."""
    if "://" not in url:
        return url
    import sqlalchemy

    try:
        address: Any = sqlalchemy.make_url(url)
    except sqlalchemy.exc.ArgumentError:
        return url
    return str(address.render_as_string(hide_password=True))
