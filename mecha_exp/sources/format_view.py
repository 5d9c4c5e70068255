"""A model read as if it had another format: what is asked for is read from where it lies in the original."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping

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


class ConvertedSource(SourceView):
    """A source whose keys are views of another's.

    A stacked or a split tensor is still a sequence of ranges of the original, so tiles are read from there
    without a copy in between. A transposed one is read as a whole and kept: only CLIP's projection is.

    Attributes:
        unused: keys of the original that no view has.
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
        made_of = [(key, repr(view)) for key, view in self._views.items()]
        return hashlib.sha256(json.dumps([__version__, self.identity, made_of]).encode()).hexdigest()

    def keys(self) -> Collection[str]:
        return self._infos.keys()

    def info(self, key: str) -> TensorInfo:
        return self._infos[key]

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        made_of = self._views[key]
        if made_of.transposed:
            view[:] = self._transpose(made_of.sources[0])[start : start + len(view)].numpy().data
            return
        done = 0  # bytes of the view that are filled
        for source, offset, size in self._ranges(key):
            if start < size and done < len(view):
                piece = view[done : done + size - start]
                self._original.read_bytes_into(source, offset + start, piece)
                done += len(piece)
            start = max(0, start - size)

    def region(self, key: str) -> FileRegion | None:
        first, *others = self._ranges(key)
        place = None if others or self._views[key].transposed else self._original.region(first[0])
        return place and place._replace(offset=place.offset + first[1])

    def _ranges(self, key: str) -> Iterator[tuple[str, int, int]]:
        """What a key is made of, in order: a key of the original, where in it to begin, how many bytes."""
        view = self._views[key]
        for source in view.sources:
            size = self._original.info(source).nbytes // view.of
            yield source, view.index * size, size

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
    """A model in the format of another config.

    Args:
        original: the model.
        target: the config, or its identifier.
        config: what the model is; found by its keys and shapes by default.

    Raises:
        ConfigError: the config is not known, several fit, or nothing leads from it to the target.
        CheckpointError: tensors that do not fit each other.
    """
    found = detect(infos_of(original), None if config is None else [config])
    if config is not None and not found.is_known:
        raise CheckpointError(f"{original.name} is no {config.identifier}: its keys are others.")
    wanted = resolve(target) if isinstance(target, str) else target
    own_names = {name: key for key, name in found.renamed.items()}
    return ConvertedSource(original, views(found.config, wanted).named(own_names))


def _available(original: Source, by_key: Mapping[str, View]) -> dict[str, View]:
    """The views whose sources are there, in the order in which those lie in the original."""
    place = {key: i for i, key in enumerate(original.keys())}
    problems = Problems()
    found: dict[str, View] = {}
    for key, view in by_key.items():
        lacking = [source for source in view.sources if source not in place]
        if not lacking:
            found[key] = view
        elif len(lacking) < len(view.sources):
            problems.add(f"{original.name}: {some(lacking)} is missing, of which {key} would be made.")
    problems.raise_as(CheckpointError)
    return dict(sorted(found.items(), key=lambda item: (place[item[1].sources[0]], item[1].index)))


def _infos(original: Source, made_of: Mapping[str, View]) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    problems = Problems()
    for key, view in made_of.items():
        sources = [original.info(source) for source in view.sources]
        if len({info.dtype for info in sources}) > 1:
            listed = ", ".join(f"{k} {original.info(k).dtype}" for k in view.sources)
            problems.add(f"{original.name}: {key} would be made of different dtypes: {listed}.")
        try:
            shape = view.shape({k: original.info(k).shape for k in view.sources})
        except CheckpointError as error:
            problems.add(f"{original.name}: {key}: {error}")
            continue
        nbytes = sum(info.nbytes for info in sources) // view.of
        infos[key] = TensorInfo(sources[0].dtype, shape, sources[0].offset + view.index * nbytes, nbytes)
    problems.raise_as(CheckpointError)
    return infos
