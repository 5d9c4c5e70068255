"""Keeps the source of plugins with a run, so that it can be made again when they are gone."""

from __future__ import annotations

import inspect
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mecha_exp.documents import read_json, typed
from mecha_exp.engine.code_hash import methods_of
from mecha_exp.engine.code_hash.functions import source_modules
from mecha_exp.errors import prefixed
from mecha_exp.evaluation.declaration import Evaluator
from mecha_exp.graph.nodes import Node

SOURCES_FILE = "sources.json"
_OWN = "mecha_exp"


def sources_text(recipe: Node, evaluators: Iterable[Evaluator] = ()) -> str:
    """The plugins' source as JSON, by the path below the folder of the import; empty without any.

    Args:
        recipe: the graph, whose merge methods may be of plugins.
        evaluators: which may be of plugins, too.
    """
    texts: dict[str, str] = {}
    functions: list[Any] = sorted(methods_of(recipe), key=lambda method: method.identifier)
    functions += [inspect.unwrap(evaluator.score) for evaluator in evaluators]
    for function in functions:
        code = getattr(function, "__wrapped__", function)
        if (getattr(code, "__module__", None) or _OWN).partition(".")[0] == _OWN:
            continue
        for module in source_modules(function):
            path = Path(str(module.__file__))
            parts = module.__name__.split(".") if not module.__name__.startswith(f"{_OWN}_plugin_") else []
            above = parts if path.name == "__init__.py" else parts[:-1]
            if parts[:1] != [_OWN] and path.suffix == ".py":
                texts["/".join([*above, path.name])] = path.read_text(encoding="utf-8")
    return json.dumps(texts, indent=1, sort_keys=True) if texts else ""


def programs_in(config: Mapping[str, Any]) -> list[str]:
    """What the configuration of a result names that is run as code.

    Its plugins, and in the settings of evaluators Python files, folders of tasks of lm-evaluation-harness
    (whose YAML may name functions), and the permission to run what lies in a model's folder.
    """
    plugins = config.get("plugins")
    named = [plugins] if isinstance(plugins, str) else plugins if isinstance(plugins, list) else []
    return [*map(str, named), *_named_code(config.get("evaluator"))]


def _named_code(settings: Any) -> Iterator[str]:
    if isinstance(settings, list):
        for part in settings:
            yield from _named_code(part)
    if not isinstance(settings, Mapping):
        return
    for name, value in settings.items():
        is_code = isinstance(value, str) and (".py" in value or name == "include_path")
        if is_code or (name == "trust_remote_code" and value):
            yield f"evaluator.{name}={value}"
        else:
            yield from _named_code(value)


def restore_plugins(
    run: Path | None, plugins: Iterable[str], scratch: Path, loaded: Iterable[str] = ()
) -> list[str]:
    """The plugins of a run that are to be loaded, each that is gone replaced by what was kept with the run.

    Args:
        run: the folder of the run.
        plugins: as the configuration names them.
        scratch: where the kept files are written.
        loaded: plugins that are loaded already: each stands for one that is gone and has the same name.
    """
    known = {Path(name).name for name in loaded}
    names = [str(plugin) for plugin in plugins]
    names = [name for name in names if Path(name).exists() or Path(name).name not in known]
    kept = run / SOURCES_FILE if run else None
    if kept is None or not kept.is_file() or all(Path(name).exists() for name in names):
        return names
    folder = scratch / "sources"
    with prefixed(f"{kept}: "):
        texts = typed(read_json(kept), dict[str, str])
    for relative, text in texts.items():
        path = folder / relative.replace("\0", "")
        if path.suffix == ".py" and path.resolve().is_relative_to(folder.resolve()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    present = [[name] if Path(name).exists() else _kept(name, folder) for name in names]
    return list(dict.fromkeys(itertools.chain.from_iterable(present)))


def _kept(name: str, folder: Path) -> list[str]:
    """The files that stand for a plugin that is gone: its kept file, those of its folder, or its own name."""
    path, module = folder / Path(name).name, folder.joinpath(*name.split("."))
    if path.is_file():
        return [str(path)]
    if Path(name).suffix or module.is_dir() or module.with_suffix(".py").is_file():
        return [name]  # a module, which is found in the folder; or a file that was not kept
    return sorted(map(str, folder.glob("*.py"))) or [name]
