"""The parts of a pipeline of diffusers: which of them have weights, and whether a model's fit them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mecha_exp.documents import DocumentError, read_json, typed
from mecha_exp.errors import ConfigError, some
from mecha_exp.evaluation.declaration import Shapes
from mecha_exp.evaluators.common import ModelFolder, calm, check_network, network, one_line
from mecha_exp.evaluators.common.devices import AUTO
from mecha_exp.evaluators.common.loading import check_fit

INDEX = "model_index.json"
_LIBRARIES = ("diffusers", "transformers")
_WEIGHTS = (".safetensors", ".bin")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Component:
    """A part of a pipeline, such as its `unet`.

    Attributes:
        name: in the pipeline.
        library: where its class is: `diffusers`, `transformers`, or a folder of pipelines of diffusers.
        kind: the name of its class.
        folder: with its configuration, and with its weights if it has some.
    """

    name: str
    library: str
    kind: str
    folder: Path

    @cached_property
    def made_by(self) -> Any:
        """The class of diffusers or transformers that the pipeline names.

        Raises:
            ConfigError: the installed library has none of this name.
        """
        try:
            return getattr(import_module(self._module), self.kind)
        except (ImportError, AttributeError):
            raise ConfigError(
                f"{self.folder}: {self._module} has no class {self.kind} for the component '{self.name}'. "
                "Install the version that wrote the pipeline; components with code of their own are not run."
            ) from None

    @property
    def _module(self) -> str:
        return self.library if self.library in _LIBRARIES else f"diffusers.pipelines.{self.library}"

    @property
    def is_network(self) -> bool:
        """Whether it has weights."""
        return isinstance(self.made_by, type) and issubclass(self.made_by, nn.Module)

    @property
    def is_of_diffusers(self) -> bool:
        """Whether diffusers loads it; transformers loads the other networks."""
        return issubclass(self.made_by, import_module("diffusers").ModelMixin)

    @property
    def files(self) -> list[Path]:
        """The files with its weights."""
        return sorted(file for file in self.folder.glob("*") if file.suffix in _WEIGHTS)

    def prefix(self, component: str | None) -> str:
        """What the keys of its weights begin with in a model; nothing where that is this component alone."""
        return "" if component else f"{self.name}."

    def part_of(self, entries: Mapping[str, _Value], component: str | None) -> dict[str, _Value]:
        """The entries of a model that are of this component, by the names in it.

        Args:
            entries: by key.
            component: the one that the keys are of; None where they begin with the names of components.
        """
        prefix = self.prefix(component)
        return {key.removeprefix(prefix): v for key, v in entries.items() if key.startswith(prefix)}

    def check(self, shapes: Shapes) -> None:
        """Check that weights of these shapes fit the network, also under the names of older versions.

        Raises:
            ConfigError: they do not.
        """
        if not self.is_of_diffusers:
            check_network(ModelFolder(self.folder), shapes, f"{self._module}:{self.kind}")
            return
        self._named(self._blank(), {k: torch.empty(shape, device="meta") for k, shape in shapes.items()})

    def _blank(self) -> nn.Module:
        """The network without weights; of those that compute at once with them, as on the CPU."""
        kind = f"{self.kind} of {self.folder / 'config.json'}"
        with (
            calm(offline=True),
            one_line(f"diffusers cannot make the {kind}", (OSError, ValueError, TypeError)),
        ):
            config = self.made_by.load_config(self.folder, local_files_only=True)
            try:
                with torch.device("meta"):
                    made: nn.Module = self.made_by.from_config(config)
            except (RuntimeError, NotImplementedError):  # it reads a number of a tensor
                made = self.made_by.from_config(config)
            return made

    def _named(self, made: Any, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights by the names that the network has for them today."""
        named, own = dict(part), made.state_dict()
        made._fix_state_dict_keys_on_load(named)
        wrong = {key: (list(t.shape), list(own[key].shape)) for key, t in named.items() if key in own}
        check_fit(
            f"{self.kind} of {self.folder / 'config.json'}",
            missing=[key for key in own if key not in named],
            unexpected=[key for key in named if key not in own],
            mismatched=[
                (key, there, expected) for key, (there, expected) in wrong.items() if there != expected
            ],
            mend="Name the folder of a pipeline with the same keys and shapes with evaluator.model=PATH.",
        )
        return named

    @contextmanager
    def filled(self, made: Any, part: Mapping[str, Tensor], device: str, dtype: str) -> Iterator[nn.Module]:
        """The network with these weights, in evaluation mode; it loses them when the block ends.

        Args:
            made: the pipeline's own network.
            part: the weights by their names in the component.
            device: where it computes.
            dtype: of the network, such as `float32`; `auto` is that of the weights.

        Raises:
            ConfigError: the weights do not fit.
        """
        if not self.is_of_diffusers:
            kind = f"{self._module}:{self.kind}"
            with network(ModelFolder(self.folder), part, kind, device=device, dtype=dtype) as module:
                yield module
            return
        named = self._named(made, part)
        if dtype != AUTO:
            number = getattr(torch, dtype)
            named = {k: t.to(number) if t.is_floating_point() else t for k, t in named.items()}
        made.load_state_dict(named, assign=True)
        try:
            yield made.eval()
        finally:
            empty = {k: torch.empty_like(t, device="meta") for k, t in made.state_dict().items()}
            made.load_state_dict(empty, assign=True)


def index_of(folder: ModelFolder) -> dict[str, Any]:
    """The content of a pipeline's `model_index.json`.

    Raises:
        ConfigError: it is not there, or cannot be read.
    """
    try:
        return typed(read_json(folder.path / INDEX), dict[str, Any])
    except (OSError, DocumentError):
        raise ConfigError(
            f"{folder.path} is not the folder of a diffusers pipeline: there is no {INDEX} in it that can be "
            "read. Name a pipeline with evaluator.model=PATH."
        ) from None


def components_of(folder: ModelFolder) -> list[Component]:
    """The components of a pipeline, without those that it leaves empty.

    Raises:
        ConfigError: the folder is not a pipeline, or lacks a component's folder.
    """
    entries = {n: e for n, e in index_of(folder).items() if isinstance(e, list) and len(e) == 2}
    listed = [Component(n, str(e[0]), str(e[1]), folder.path / n) for n, e in entries.items() if e[0]]
    for component in listed:
        if not os.path.isdir(component.folder):  # noqa: PTH112, False for a name that is too long
            raise ConfigError(
                f"{folder.path}: the component '{component.name}' of the pipeline is missing. Copy its "
                "folder there from the pretrained pipeline."
            )
    return listed


def networks_of(folder: ModelFolder) -> list[Component]:
    """The components of a pipeline that have weights.

    Raises:
        ConfigError: the weights of one are missing.
    """
    with calm(offline=True):
        networks = [component for component in components_of(folder) if component.is_network]
    for component in networks:
        if not component.files:
            raise ConfigError(
                f"{component.folder}: the weights of the component '{component.name}' are missing. Copy them "
                "there from the pretrained pipeline, or fetch the whole of it: hf download ORG/NAME "
                f"--local-dir {folder.path}"
            )
    return networks


def check_components(folder: ModelFolder, shapes: Shapes, component: str | None) -> None:
    """Check that the weights of a model are those of every component, or of one, with a row for each token.

    Raises:
        ConfigError: they are not.
    """
    networks = {part.name: part for part in networks_of(folder)}
    if component is not None and component not in networks:
        raise ConfigError(
            f"evaluator.component={component}: the pipeline in {folder.path} has the components "
            f"{some(networks)}."
        )
    merged = [networks[component]] if component else [*networks.values()]
    parts = {of_pipeline: of_pipeline.part_of(shapes, component) for of_pipeline in merged}
    if lost := [of_pipeline.name for of_pipeline, part in parts.items() if not part]:
        there = some(sorted({key.split(".")[0] for key in shapes}), limit=4)
        raise ConfigError(
            f"the model has no keys of the component '{lost[0]}' of the pipeline in {folder.path}: its keys "
            f"begin with {there}. Merge folders of pipelines; or name the component that is merged, as with "
            "evaluator.component=unet, and the rest is the pipeline's."
        )
    for of_pipeline, part in parts.items():
        _check_tokens(folder, part, of_pipeline.name)
        of_pipeline.check(part)


def _check_tokens(folder: ModelFolder, part: Shapes, component: str) -> None:
    """Check that a text encoder has a row for each token: `text_encoder_2` has `tokenizer_2`."""
    tokens = folder.path / component.replace("text_encoder", "tokenizer")
    if tokens.name != component and tokens.is_dir():
        ModelFolder(tokens).check_vocabulary({f"{component}.{key}": shape for key, shape in part.items()})
