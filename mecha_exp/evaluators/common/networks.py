"""Networks that are built once, and take the tensors of each model without a copy.

The first model is loaded by its library, which knows the names, ties and buffers of every architecture. What
went where is read off the result; the tensors of later models are put there, and taken out again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mecha_exp.checkpoint.sidecars import companions
from mecha_exp.errors import ConfigError, EvaluationError
from mecha_exp.evaluation.declaration import Shapes
from mecha_exp.evaluation.transfers import transfers_to
from mecha_exp.evaluators.common.devices import AUTO, chosen_device, chosen_dtype
from mecha_exp.evaluators.common.folders import ModelFolder
from mecha_exp.evaluators.common.loading import Loader, Weights, check_fit

NAN_LOGITS = (
    "the logits are NaN. Merge with a smaller strength or in float32 (engine.compute_dtype), or measure with "
    "evaluator.dtype=float32."
)

Load = Callable[[Weights], nn.Module]


@contextmanager
def network(
    folder: ModelFolder,
    state_dict: Weights,
    kind: str = "AutoModel",
    *,
    device: str = "cpu",
    dtype: str = AUTO,
    settings: Mapping[str, Any] | None = None,
    unused: tuple[str, ...] = (),
    absent: tuple[str, ...] = (),
) -> Iterator[Any]:
    """A model of transformers with these weights, in evaluation mode; it loses them when the block ends.

    Args:
        folder: its configuration.
        state_dict: the weights, under the names of the saved model. Tensors are shared, not copied, where
            device and dtype are those of the network.
        kind: a class of transformers, such as `AutoModelForCausalLM` or `CLIPModel`.
        device: where it computes.
        dtype: `auto` is that of the weights, or of the configuration where they differ.
        settings: entries of the configuration to set, such as `num_labels`.
        unused: starts of keys that may be there without being used, such as `classifier.`.
        absent: starts of keys of the network that may be missing, such as `pooler.`: what they compute is
            random, and the caller uses none of it.

    Raises:
        ConfigError: the weights do not fit, the configuration is unknown, or the device is not there.
    """
    place = chosen_device(device)
    shapes = {key: tuple(tensor.shape) for key, tensor in state_dict.items()}
    number = chosen_dtype(dtype, state_dict, folder.config)
    loader = Loader(folder, kind, number, settings or {}, unused, absent)
    slot = _slot(loader.identity, str(place), frozenset(shapes.items()))
    with slot.filled(loader.load, state_dict, place) as module:
        yield module


@contextmanager
def module_network(
    make: Callable[[], nn.Module],
    state_dict: Weights,
    *,
    name: str,
    version: object = "",
    device: str = "cpu",
) -> Iterator[nn.Module]:
    """A module of a user's factory with these weights, in evaluation mode; it loses them when the block ends.

    Args:
        make: returns the module; it is called on the meta device where all its tensors are in the state dict.
        state_dict: the weights under the names of the module.
        name: of the factory, for errors.
        version: of the factory: with another one the module is made anew.
        device: where it computes.

    Raises:
        ConfigError: the keys or shapes are not those of the module, or the factory fails.
    """

    shapes = frozenset((key, tuple(tensor.shape)) for key, tensor in state_dict.items())
    slot = _slot(f"{name} {version}", device, shapes)
    with slot.filled(lambda weights: _load(make, weights, name), state_dict, chosen_device(device)) as module:
        yield module


def check_module(make: Callable[[], nn.Module], shapes: Shapes, *, name: str) -> nn.Module:
    """The module of a user's factory, checked before a merge against the shapes of the weights.

    Args:
        make: as for `module_network`.
        shapes: of the weights by key.
        name: of the factory, for errors.

    Returns:
        the module, whose weights are zero.

    Raises:
        ConfigError: the keys or shapes are not those of the module, or the factory fails.
    """
    # one number for all entries of a tensor: it takes no memory
    return _load(make, {key: torch.zeros(()).expand(shape) for key, shape in shapes.items()}, name)


def _load(make: Callable[[], nn.Module], weights: Weights, name: str) -> nn.Module:
    """A module of a user's factory, whose tensors are those of the state dict."""
    with torch.device("meta"):
        module = _made(make, name)
    computed = [buffer for buffer, _ in module.named_buffers() if buffer not in weights]
    if computed:  # their values are not in the state dict: they must be computed
        module = _made(make, name)
    own = module.state_dict()
    wrong = {key: (t.shape, own[key].shape) for key, t in weights.items() if key in own}
    check_fit(
        name,
        missing=[key for key in own if key not in weights],
        unexpected=[key for key in weights if key not in own],
        mismatched=[(key, a, b) for key, (a, b) in wrong.items() if a != b],
        mend="Return a module whose state_dict() has the keys and shapes of the model.",
    )
    module.load_state_dict(weights, assign=True)
    return module.eval()


def _made(make: Callable[[], nn.Module], name: str) -> nn.Module:
    try:
        module = make()
    except Exception as error:  # of the user's code
        raise ConfigError(f"{name} cannot make a module: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{name} returns a {type(module).__name__}: expected a torch.nn.Module.")
    return module


@contextmanager
def refuse_nan(module: nn.Module) -> Iterator[None]:
    """Raise an error for a logit that is NaN, from which a library would compute a number all the same.

    Raises:
        EvaluationError: of `module`, within the block.
    """

    def look(called: nn.Module, arguments: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if logits is not None and bool(logits.isnan().any()):
            raise EvaluationError(NAN_LOGITS)

    hook = module.register_forward_hook(look)
    try:
        yield
    finally:
        hook.remove()


def write_model(state_dict: Weights, folder: ModelFolder, target: Path) -> None:
    """Write weights beside copies of a folder's small files, for a library that loads models by itself."""
    save_file({key: tensor.contiguous() for key, tensor in state_dict.items()}, target / "model.safetensors")
    for name, file in companions(folder.path).items():
        (target / name).parent.mkdir(exist_ok=True)
        copyfile(file, target / name)


@dataclass
class _Slot:
    """A network without weights, and the places where those of a model go.

    Attributes:
        module: None before the first model.
        places: for each tensor of the module the key of the state dict that it is; None where the library
            changes tensors on the way, so that it loads every model.
    """

    module: nn.Module | None = None
    places: Mapping[str, str] | None = None
    empty: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def filled(self, load: Load, weights: Weights, device: torch.device) -> Iterator[nn.Module]:
        if self.module is None or self.places is None:
            self.module = load(weights)
            self.places = places_of(self.module, weights)
            if device.type != "cpu":
                self._put(weights, device)
                self.module.to(device)
        else:
            self._put(weights, device)
        try:
            with torch.inference_mode():
                yield self.module
        finally:
            self._release()

    def _put(self, weights: Weights, device: torch.device) -> None:
        """Put the tensors of a model where they go: themselves, or their copies on a GPU."""
        assert self.module is not None
        current, places = self.module.state_dict(), self.places or {}
        dtypes = {key: current[name].dtype for name, key in places.items()}
        if device.type == "cpu":
            tensors = {key: weights[key].to(dtype) for key, dtype in dtypes.items()}
        else:
            tensors = transfers_to(device).moved(weights, dtypes)
        there = {name: tensors[key] for name, key in places.items()}
        self.module.load_state_dict(there, strict=False, assign=True)

    def _release(self) -> None:
        """Let go of the weights, which would otherwise stay in memory while the next model is merged."""
        if self.places is None or self.module is None:
            self.module = None
            return
        current = self.module.state_dict()
        empty = {name: torch.empty_like(current[name], device="meta") for name in self.places}
        self.module.load_state_dict(empty, strict=False, assign=True)


@lru_cache(maxsize=4)
def _slot(identity: str, device: str, shapes: frozenset[tuple[str, tuple[int, ...]]]) -> _Slot:
    return _Slot()


def places_of(module: nn.Module, weights: Weights) -> dict[str, str] | None:
    """The key of the state dict for each tensor of a loaded module; None where the library changed one."""
    own = module.state_dict()
    places: dict[str, str] = {}
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    by_memory = {_memory(tensor): name for name, tensor in own.items() if tensor.numel()}
    for key, tensor in weights.items():
        renamed = by_memory.get(_memory(tensor), key)  # as transformers renames those of a ViT
        names = (renamed, key, f"{prefix}{key}", key.removeprefix(prefix))
        name = next((name for name in names if name in own and own[name].shape == tensor.shape), None)
        if name is None or not is_same(own[name], tensor):
            return None
        places[name] = key
    held = {own[name].data_ptr(): key for name, key in places.items()}
    if len(held) < len(places):  # two keys are one tensor of the module
        return None
    tied = {name: held[t.data_ptr()] for name, t in own.items() if t.data_ptr() in held and t.numel()}
    return {**tied, **places}


def is_same(own: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor of a module has the values of a stored tensor of its shape, in its own dtype."""
    if _memory(own) == _memory(tensor):
        return True
    stored, held = tensor.detach().cpu().to(own.dtype), own.detach().cpu()
    return torch.equal(held.nan_to_num(), stored.nan_to_num())


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Where the entries of a tensor lie: the same for a tensor of a module that shares those of a model."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
