"""The inputs of a merge: where a path is looked for, and one way to read files and in-memory models."""

from __future__ import annotations

import importlib.resources
import math
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from mecha_exp.checkpoint import StoredModel, TensorInfo, dtype_name, is_arithmetic, open_stored, torch_dtype
from mecha_exp.checkpoint.files import Place
from mecha_exp.checkpoint.hub import hub_folder, is_hub_name
from mecha_exp.errors import CheckpointError, Problems, did_you_mean
from mecha_exp.extensions import model_dirs
from mecha_exp.nodes import InMemory, ModelNode

PACKAGE_SCHEME = "pkg://"
MODELS_DIR_VARIABLE = "MECHA_MODELS_DIR"
_LOOK = 1 << 20


class Source(Protocol):
    """A state dict that is read by parts of flattened tensors."""

    @property
    def name(self) -> str:
        """How messages call it."""

    @property
    def path(self) -> Path | None:
        """Its file or folder, if it has one."""

    @property
    def files(self) -> Sequence[Path]:
        """The files that hold its tensors."""

    @property
    def identity(self) -> tuple[str | int, ...] | None:
        """What is another one when the data may be; None where nothing tells."""

    def keys(self) -> Collection[str]:
        """The keys in the order in which they are best read."""

    def __contains__(self, key: str) -> bool:
        """Whether it has a key."""

    def info(self, key: str) -> TensorInfo:
        """The dtype and the shape of a key."""

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` with the elements from `start` on."""

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `start` on."""

    def place(self, key: str) -> Place | None:
        """Where the bytes of a key lie; None where they are not in a file as they are."""

    def check_unchanged(self) -> None:
        """CheckpointError where the data is no longer what the plan saw."""

    def close(self) -> None:
        """Nothing is read from it any more. Idempotent."""


def infos_of(source: Source) -> dict[str, TensorInfo]:
    """The dtype and the shape of every key: what a model is recognised by."""
    return {key: source.info(key) for key in source.keys()}


class MemorySource:
    """A state dict in memory."""

    path: Path | None = None
    files: Sequence[Path] = ()
    identity: tuple[str | int, ...] | None = None

    def __init__(self, model: InMemory) -> None:
        self.name = model.name
        self._tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in model.state_dict.items()}
        self._infos = {
            key: TensorInfo(dtype_name(t.dtype), tuple(t.shape), 0, t.nbytes)
            for key, t in self._tensors.items()
        }
        self.keys = self._tensors.keys

    def __contains__(self, key: str) -> bool:
        return key in self._infos

    def info(self, key: str) -> TensorInfo:
        return self._infos[key]

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        out.copy_(self._tensors[key].view(-1)[start : start + out.numel()])

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        raw = self._tensors[key].reshape(-1).view(torch.uint8)[start : start + len(view)]
        view[:] = raw.numpy().data

    def place(self, key: str) -> Place | None:
        return None

    def check_unchanged(self) -> None:
        pass

    def close(self) -> None:
        pass


class DerivedSource:
    """What is read from another source: it has the same files, under the same name."""

    def __init__(self, original: Source) -> None:
        self._original = original
        self.name = original.name
        self.path: Path | None = original.path
        self.files: Sequence[Path] = original.files
        self.identity = original.identity
        self.check_unchanged = original.check_unchanged
        self.close = original.close

    def place(self, key: str) -> Place | None:
        """Where the bytes of a key lie, if it has them as the original does."""
        return None


@contextmanager
def open_sources(models: Sequence[ModelNode], folders: Sequence[Path]) -> Iterator[dict[ModelNode, Source]]:
    """Open every model, or raise one CheckpointError that names all that cannot be opened."""
    sources: dict[ModelNode, StoredModel | MemorySource] = {}
    problems = Problems()
    try:
        for model in models:
            try:
                sources[model] = _open(model, folders)
            except CheckpointError as error:
                problems.add(error)
        problems.raise_as(CheckpointError)
        yield dict(sources)
    finally:
        for source in sources.values():
            source.close()


class FiniteSource:
    """The keys of another source whose values are all finite; made by looking at all of them.

    Attributes:
        spoilt: the other keys.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._finite = {key: None for key in source.keys() if _is_finite(source, key)}
        self.spoilt = frozenset(source.keys()) - self._finite.keys()
        self.keys = self._finite.keys

    def __contains__(self, key: str) -> bool:
        return key in self._finite

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def _is_finite(source: Source, key: str) -> bool:
    info = source.info(key)
    if not is_arithmetic(info.dtype):
        return True
    count = math.prod(info.shape)
    tile = torch.empty(min(count, _LOOK), dtype=torch_dtype(info.dtype))
    for start in range(0, count, _LOOK):
        part = tile[: min(_LOOK, count - start)]
        source.read_into(key, start, part)
        if not (part if part.dtype.itemsize > 1 else part.float()).isfinite().all():
            return False
    return True


def find_model(path: str, folders: Sequence[Path]) -> Path:
    """The file or the folder that a model's path means.

    A path is relative to the current folder, then to each of the model folders and to those that the
    environment variable MECHA_MODELS_DIR lists; `.safetensors` may be left out. `pkg://some.package/file` is
    a file inside an installed package, and `org/name` that is nowhere a model of the Hugging Face hub.

    Raises:
        CheckpointError: it is nowhere; the message says where was looked, and what lies there.
    """
    if path.startswith(PACKAGE_SCHEME):
        return packaged(path)
    named = os.environ.get(MODELS_DIR_VARIABLE, "").split(os.pathsep)
    places = (Path(), *folders, *model_dirs.get_all(), *(Path(folder) for folder in named if folder))
    tried = [folder / path for folder in places]
    lies = {file: _lies_at(file) for name in tried for file in (name, Path(f"{name}.safetensors"))}
    for wanted in (True, None):  # opening it says why it cannot be told
        if (found := next((file for file, answer in lies.items() if answer is wanted), None)) is not None:
            return found
    if is_hub_name(path) and not Path(path).parent.is_dir():
        return hub_folder(path)
    lying = {p.name for t in tried if t.parent.is_dir() for p in t.parent.glob("*.safetensors")}
    looked = ", ".join(str(p.parent.resolve()) for p in dict.fromkeys(tried))
    raise CheckpointError(
        f"the model '{path}' does not exist. Looked in {looked}.{did_you_mean(Path(path).name, lying)}"
    )


def _lies_at(path: Path) -> bool | None:
    """Whether something is there, be it a link that leads nowhere; None where that may not be known."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return None
    return True


def packaged(path: str) -> Path:
    """The file or folder that a `pkg://some.package/name` means."""
    package, _, name = path.removeprefix(PACKAGE_SCHEME).partition("/")
    try:
        return Path(str(importlib.resources.files(package).joinpath(name)))
    except ModuleNotFoundError:
        raise CheckpointError(f"'{path}': there is no package '{package}'.") from None


def _open(model: ModelNode, folders: Sequence[Path]) -> StoredModel | MemorySource:
    if isinstance(model.source, InMemory):
        return MemorySource(model.source)
    return open_stored(find_model(model.source, folders))
