"""Keeps the source of plugins with a run, so that it can be made again when they are gone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from mecha_exp.engine.code_hash import methods_of
from mecha_exp.engine.code_hash.functions import source_modules
from mecha_exp.graph.nodes import Node

SOURCES_FILE = "sources.json"
_OWN = "mecha_exp"


def sources_text(recipe: Node) -> str:
    """The plugins' source as JSON, by the path below the folder of the import; empty without any."""
    texts: dict[str, str] = {}
    for method in sorted(methods_of(recipe), key=lambda method: method.identifier):
        if (getattr(method.__wrapped__, "__module__", None) or _OWN).partition(".")[0] == _OWN:
            continue
        for module in source_modules(method):
            path = Path(str(module.__file__))
            parts = module.__name__.split(".") if not module.__name__.startswith(f"{_OWN}_plugin_") else []
            above = parts if path.name == "__init__.py" else parts[:-1]
            if parts[:1] != [_OWN] and path.suffix == ".py":
                texts["/".join([*above, path.name])] = path.read_text(encoding="utf-8")
    return json.dumps(texts, indent=1, sort_keys=True) if texts else ""


def restore_plugins(run: Path | None, plugins: Iterable[str], scratch: Path) -> list[str]:
    """The plugins of a run, each file that is gone replaced by what was kept with the run.

    Args:
        run: the folder of the run.
        plugins: as the configuration names them.
        scratch: where the kept files are written.
    """
    names = [str(plugin) for plugin in plugins]
    kept = run / SOURCES_FILE if run else None
    if kept is None or not kept.is_file() or all(Path(name).exists() for name in names):
        return names
    folder = scratch / "sources"
    for relative, text in json.loads(kept.read_text(encoding="utf-8")).items():
        path = (folder / relative).resolve()
        if path.is_relative_to(folder.resolve()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    return [name if Path(name).exists() else _kept(name, folder) for name in names]


def _kept(name: str, folder: Path) -> str:
    path = folder / Path(name).name
    return str(path) if path.is_file() else name
