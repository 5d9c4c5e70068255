"""Measures the statistics that belong to a merge, for recipes that say how: `files: {calibrate: ...}`.

Fisher information of scaled experts (DF-Merge) changes with the scales, and Gram matrices along a merge
(RegMean++) with its alpha. So no file of the user's can hold them for a sweep. They are measured when a point
is prepared, once for each set of values, and kept in `outputs/statistics` by a hash of all that decides them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint import StateDictSource, open_stored
from mecha_exp.checkpoint.transaction.lock import exclusive
from mecha_exp.errors import ConfigError, Problems, counted, did_you_mean
from mecha_exp.lab.content_hash import content_of
from mecha_exp.paths import STATISTICS
from mecha_exp.sources.search import find_model
from mecha_exp.system.texts import json_hash
from mecha_exp.terminal.bars import examples_bar

CALIBRATE = "calibrate"
"""The word of a mapping that says how statistics are measured, in the place of their files."""

_TEXTS: dict[str, type] = {"length": int, "column": str, "label": str, "device": str, "dtype": str}
_SETTINGS: dict[str, type] = {
    "module": str, "count": int, "labels": str, "seed": int, "memory": int, **_TEXTS,
}  # fmt: skip
_WORDS = {int: "a whole number", str: "a word"}
_OWN = {
    "along_merge": ("models", "alpha", "settings"),
    "scaled": ("base", "models", "scales", "settings"),
}
"""What each kind of measurement is given."""


def measured_files(mapping: Mapping[str, Any], folders: Sequence[Path]) -> list[str]:
    """The files of statistics that a mapping asks for, which are measured where they are missing.

    Args:
        mapping: of a resolved configuration, with the word `CALIBRATE`.
        folders: where models are looked for, after the current folder.

    Raises:
        ConfigError: everything that is wrong with a measurement.
        MechaError: a model is missing, or the measurement fails.
    """
    measurement = _read(mapping, folders)
    paths = [measurement.path(index) for index in range(len(measurement.models))]
    if not all(path.exists() for path in paths):
        measure = {"along_merge": _measure_along_merge, "scaled": _measure_scaled}[measurement.kind]
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        folder = paths[0].parent  # another process may measure the same
        with exclusive(folder, partial(_newest, folder)):
            if not all(path.exists() for path in paths):
                measure(measurement, paths)
    return [str(path) for path in paths]


@dataclass(frozen=True)
class _Measurement:
    """Statistics that belong to a merge.

    Attributes:
        kind: `along_merge` or `scaled`.
        models: the files of the experts.
        base: the file of their base; of `scaled` alone.
        alpha: of RegMean++.
        scales: of DF-Merge, one for each expert.
        data: of each expert's task.
        settings: the others.
    """

    kind: str
    models: tuple[Path, ...]
    base: Path | None
    alpha: float
    scales: tuple[float, ...]
    data: tuple[str, ...]
    settings: Mapping[str, Any]

    def path(self, index: int) -> Path:
        """The file of an expert's statistics: named by all that decides its content."""
        from mecha_exp.calibration.loader import hash_of_code, hash_of_data
        from mecha_exp.calibration.measurement import code_version

        those = range(len(self.models)) if self.kind == "along_merge" else (index,)
        facts = {
            "kind": self.kind,
            "index": index if self.kind == "along_merge" else 0,
            "models": [content_of(self.models[i]) for i in those],
            "base": content_of(self.base) if self.base else None,
            "alpha": self.alpha,
            "scales": [self.scales[i] for i in those] if self.scales else [],
            "data": [(self.data[i], hash_of_data(self.data[i])) for i in those],
            "settings": {name: value for name, value in sorted(self.settings.items()) if name != "memory"},
            "code": [code_version(), hash_of_code(self.settings.get("module"))],
        }
        digest = json_hash(facts, sort_keys=True)[:32]
        return STATISTICS.absolute() / digest / f"{self.models[index].stem}.statistics.safetensors"

    def request(self, index: int) -> Any:
        """What is measured of an expert. Models are named without folders, so files are alike anywhere."""
        from mecha_exp.calibration import Request
        from mecha_exp.calibration.loader import hash_of_code, hash_of_data

        names = [name for name in ("labels", "seed", "memory") if name in self.settings]
        module = self.settings.get("module")
        return Request(
            (),
            model=self.models[index].name,
            model_sha256=content_of(self.models[index]),
            data=self.data[index],
            data_sha256=hash_of_data(self.data[index]),
            settings={"module": module} if module else {},
            code=hash_of_code(module),
            **{name: self.settings[name] for name in names},
        )

    def subject(self, index: int, stored: StateDictSource) -> Any:
        """The network of an expert with the weights of a model, and the examples of the expert's task."""
        from mecha_exp.calibration import load_subject

        texts = {name: self.settings[name] for name in _TEXTS if name in self.settings}
        count, module = self.settings.get("count"), self.settings.get("module")
        return load_subject(stored, self.data[index], module, count, **texts)


def _newest(folder: Path) -> int:
    """When anything in a folder was changed last; 0 where something goes meanwhile."""
    with suppress(OSError):
        return max(path.stat().st_mtime_ns for path in (folder, *folder.rglob("*")))
    return 0


def _measure_along_merge(measurement: _Measurement, paths: Sequence[Path]) -> None:
    """Measure all experts along their merge, and write their Gram matrices."""
    from mecha_exp.calibration import Expert, calibrate_along_merge
    from mecha_exp.calibration.sequential_grams import blocks_of

    with ExitStack() as stack:
        experts = []
        for index, (model, path) in enumerate(zip(measurement.models, paths, strict=True)):
            stored = stack.enter_context(open_stored(model))
            request = measurement.request(index)
            experts.append(Expert(measurement.subject(index, stored), stored, request, path))
        examples = sum(len(expert.subject.examples) for expert in experts)
        blocks = len(blocks_of(experts[0].subject))
        with examples_bar("measuring along the merge", examples * blocks) as advance:
            calibrate_along_merge(experts, measurement.alpha, advance)


def _measure_scaled(measurement: _Measurement, paths: Sequence[Path]) -> None:
    """Measure the experts that are missing, each at its scale, and write their Fisher information."""
    from mecha_exp.calibration import calibrate_scaled

    assert measurement.base is not None
    for index, (model, path) in enumerate(zip(measurement.models, paths, strict=True)):
        if path.exists():
            continue
        with examples_bar(f"measuring {model.stem}", measurement.settings.get("count") or 0) as advance:
            calibrate_scaled(
                measurement.base,
                model,
                measurement.scales[index],
                partial(measurement.subject, index),
                measurement.request(index),
                path,
                advance,
            )


def _read(mapping: Mapping[str, Any], folders: Sequence[Path]) -> _Measurement:
    """The measurement that a mapping asks for.

    Raises:
        ConfigError: everything that is wrong with it.
        CheckpointError: a model does not exist.
    """
    kind, problems = str(mapping[CALIBRATE]), Problems()
    if kind not in _OWN:
        raise ConfigError(f"{CALIBRATE}: {kind}: expected {' or '.join(_OWN)}.{did_you_mean(kind, _OWN)}")
    for name in mapping.keys() - {CALIBRATE, *_OWN[kind]}:
        problems.add(f"{CALIBRATE}={kind}: it takes no '{name}'.{did_you_mean(str(name), _OWN[kind])}")
    for name in _OWN[kind]:
        if name not in mapping:
            problems.add(f"{CALIBRATE}={kind}: '{name}' is missing.")
    problems.raise_as(ConfigError)
    if not isinstance(mapping["settings"], Mapping):
        raise ConfigError(
            f"calibration: expected settings such as calibration.count=100, got {mapping['settings']!r}."
        )
    if mapping.get("base", "") is None:
        raise ConfigError("models.base: the method scales task vectors from a base, and there is none.")
    settings = {name: value for name, value in mapping["settings"].items() if value is not None}
    models = [str(model) for model in mapping["models"]]
    data = settings.pop("data", ())
    _check_settings(settings, data, models, problems)
    scales = mapping.get("scales", ())
    if isinstance(scales, int | float):
        scales = [scales] * len(models)
    given_scales, experts = counted(len(scales), "is", "are"), counted(len(models), "expert")
    if "scales" in _OWN[kind] and len(scales) != len(models):
        problems.add(f"scales: {given_scales} given for {experts}. Give one number, or {len(models)}.")
    alpha = mapping.get("alpha", 0.0)
    if not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        problems.add(f"damping: expected one number from 0 to 1 for all layers, got {alpha!r}.")
    problems.raise_as(ConfigError)
    base = find_model(str(mapping["base"]), folders) if "base" in mapping else None
    files = tuple(find_model(model, folders) for model in models)
    numbers = tuple(float(scale) for scale in scales)
    return _Measurement(kind, files, base, float(alpha), numbers, tuple(map(str, data)), settings)


def _check_settings(
    settings: Mapping[str, Any], data: Any, models: Sequence[str], problems: Problems
) -> None:
    for name, value in settings.items():
        expected = _SETTINGS.get(name)
        if expected is None:
            problems.add(f"calibration.{name}: there is no such setting.{did_you_mean(name, _SETTINGS)}")
        elif not isinstance(value, expected) or isinstance(value, bool):
            problems.add(f"calibration.{name}: expected {_WORDS[expected]}, got {value!r}.")
    if not isinstance(data, list | tuple) or not data:
        problems.add(
            "calibration.data: the method measures the experts on data of their tasks, and there are none. "
            "Give one for each expert, in their order: models.data=[a.jsonl,b.jsonl]"
        )
    elif len(data) != len(models):
        problems.add(
            f"calibration.data: data of {counted(len(data), 'task')} are given for "
            f"{counted(len(models), 'expert')}. Give one for each, in the order of the experts."
        )
    if isinstance(count := settings.get("count"), int) and count < 1:
        problems.add(f"calibration.count: expected 1 or more, got {count}.")
    if settings.get("labels", "sampled") not in ("sampled", "true", "exact"):
        problems.add(f"calibration.labels: expected sampled, true or exact, got {settings['labels']!r}.")
