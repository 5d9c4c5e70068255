"""A model read in another format, straight from the tensors of the original."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from mecha_exp._version import __version__
from mecha_exp.architectures import (
    ModelConfig,
    Views,
    detect,
    resolve,
    views,
)
from mecha_exp.architectures.views import View
from mecha_exp.checkpoint import TensorInfo
from mecha_exp.checkpoint.positional import FileRegion, byte_view
from mecha_exp.errors import CheckpointError, Problems, some
from mecha_exp.sources.source import Source, SourceView, infos_of
from mecha_exp.system.texts import json_hash


class ConvertedSource(SourceView):
    """A source whose keys are views of another source's tensors.

    A stacked or split tensor is a sequence of ranges of the original, so tiles are read from it without a
    copy. A transposed tensor (only CLIP's projection) is read as a whole and cached.

    Attributes:
        unused: keys of the original that no view reads.
    """

    def __init__(self, original: Source, conversion: Views) -> None:
        super().__init__(original)
        self._views = _available(original, conversion.by_key)
        self._infos = _infos(original, self._views)
        self._transposed: dict[str, torch.Tensor] = {}
        used = {key for view in self._views.values() for key in view.sources}
        self.unused = tuple(key for key in original.keys() if key not in used)

    @property
    def resume_token(self) -> str | None:
        """A hash of all that decides the bytes, computed without reading them; None without an identity."""
        if self.identity is None:
            return None
        return json_hash([__version__, self.identity, self.digest])

    @property
    def digest(self) -> str:
        """The SHA-256 of the views: how each key is made of the original's."""
        described = [(key, repr(view)) for key, view in self._views.items()]
        return json_hash(described)

    def keys(self) -> Collection[str]:
        return self._infos.keys()

    def info(self, key: str) -> TensorInfo:
        return self._infos[key]

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        tensor_view = self._views[key]
        if tensor_view.transposed:
            view[:] = self._transpose(tensor_view.sources[0])[start : start + len(view)].numpy().data
            return
        done = 0  # bytes of the view that are filled
        for source, offset, size in self._ranges(key):
            if start < size and done < len(view):
                piece = view[done : done + size - start]
                self._original.read_bytes_into(source, offset + start, piece)
                done += len(piece)
            start = max(0, start - size)

    def region(self, key: str) -> FileRegion | None:
        (source, offset, _), *more = self._ranges(key)
        region = None if more or self._views[key].transposed else self._original.region(source)
        return region and region._replace(offset=region.offset + offset)

    def expect(self, keys: Iterable[str]) -> None:
        self._original.expect(dict.fromkeys(source for key in keys for source in self._views[key].sources))

    def _ranges(self, key: str) -> Iterator[tuple[str, int, int]]:
        """Yield the ranges that make up a key: a key of the original, the first byte in it, and the size."""
        view = self._views[key]
        for source in view.sources:
            for index, count, of in view.ranges():
                size = self._original.info(source).nbytes // of
                yield source, index * size, count * size

    def _transpose(self, source: str) -> torch.Tensor:
        if source not in self._transposed:
            info = self._original.info(source)
            raw = torch.empty(info.nbytes, dtype=torch.uint8)
            self._original.read_bytes_into(source, 0, byte_view(raw))
            elements = raw.view(*info.shape, info.nbytes // max(info.numel, 1))
            self._transposed[source] = elements.transpose(0, 1).contiguous().view(-1)
        return self._transposed[source]


def convert_source(
    original: Source, target: ModelConfig | str, config: ModelConfig | None = None
) -> ConvertedSource:
    """Read a model in the format of another config.

    Args:
        original: the model.
        target: the config to convert to, or its identifier.
        config: the config of the model; detected by its keys and shapes by default.

    Raises:
        ConfigError: the config is unknown, several fit, or no conversion leads from it to the target.
        CheckpointError: the model does not match its config, or tensors do not fit each other.
    """
    detected = detect(infos_of(original), None if config is None else [config])
    if config is not None and not detected.is_known:
        raise CheckpointError(
            f"{original.name} is not a checkpoint of {config.identifier}: its keys do not match that config."
        )
    target = resolve(target) if isinstance(target, str) else target
    own_names = {name: key for key, name in detected.renamed.items()}
    return ConvertedSource(original, views(detected.config, target).named(own_names))


def _available(original: Source, by_key: Mapping[str, View]) -> dict[str, View]:
    """The views whose tensors the original has, in the order of the original."""
    position = {key: i for i, key in enumerate(original.keys())}
    problems = Problems()
    available: dict[str, View] = {}
    for key, view in by_key.items():
        lacking = [source for source in view.sources if source not in position]
        if not lacking:
            available[key] = view
        elif len(lacking) < len(view.sources):
            problems.add(f"{original.name}: {some(lacking)} is missing, of which {key} would be made.")
    problems.raise_as(CheckpointError)
    return dict(sorted(available.items(), key=lambda item: (position[item[1].sources[0]], item[1].way.index)))


def _infos(original: Source, by_key: Mapping[str, View]) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    problems = Problems()
    for key, view in by_key.items():
        sources = [original.info(source) for source in view.sources]
        if len({info.dtype for info in sources}) > 1:
            listed = ", ".join(f"{k} {original.info(k).dtype}" for k in view.sources)
            problems.add(f"{original.name}: {key} would be made of different dtypes: {listed}.")
        try:
            shape = view.shape({k: original.info(k).shape for k in view.sources})
        except CheckpointError as error:
            problems.add(f"{original.name}: {key}: {error}")
            continue
        way, size = view.way, sum(info.nbytes for info in sources) // view.way.of
        infos[key] = TensorInfo(
            sources[0].dtype, shape, sources[0].offset + way.index * size, way.count * size
        )
    problems.raise_as(CheckpointError)
    return infos
