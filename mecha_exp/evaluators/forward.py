"""The evaluator `forward`: how far a model's answers are from those of its inputs, on a batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import ConfigError, EvaluationError, did_you_mean, some
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Options, Shapes
from mecha_exp.evaluation.measurement import Measurement
from mecha_exp.evaluation.model import load_state_dict
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.registry import evaluator
from mecha_exp.evaluators.common import (
    ModelFolder,
    check_module,
    check_network,
    folder_of,
    module_network,
    network,
)
from mecha_exp.evaluators.common.batches import check_names, read_batch
from mecha_exp.evaluators.common.devices import AUTO, check_room, chosen_dtype
from mecha_exp.evaluators.common.functions import function_file, user_function
from mecha_exp.evaluators.common.logits import batch_logits, compare

__all__ = ["forward"]

Weights = Mapping[str, Tensor]


def _check(shapes: Shapes, context: Context, options: Options) -> None:
    """Check the batch, the network, and that all inputs have its keys and shapes, before a merge."""
    if options["batch_size"] < 1:
        raise ConfigError(f"evaluator.batch_size: expected a number above 0, got {options['batch_size']}.")
    batch = read_batch(options["data"])
    check_names(options["data"], batch, _checked(shapes, context, options))
    for name, path in _references(context, options).items():
        with open_stored(path) as model:
            theirs = {key: tuple(model.info(key).shape) for key in model.keys()}
        if theirs != dict(shapes):
            try:
                _checked(theirs, _of_input(context, name), options)
            except ConfigError as error:
                raise ConfigError(
                    f"the input '{name}' cannot be compared with: {error} Or name the inputs to compare with "
                    "in evaluator.references."
                ) from None


def _checked(shapes: Shapes, context: Context, options: Options) -> nn.Module:
    """The network of weights of these shapes, checked without them."""
    if options["module"] is not None:
        chosen_dtype(options["dtype"], {}, {})
        check_room(options["device"], shapes, options["dtype"], context)
        return check_module(user_function(options["module"], "module"), shapes, name=options["module"])
    folder = _folder(context, options)
    kind = _kind(folder, options)
    device, dtype = options["device"], options["dtype"]
    return check_network(folder, shapes, kind, device=device, dtype=dtype, context=context)


def _folder(context: Context, options: Options) -> ModelFolder:
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "evaluator=forward needs transformers, which is not installed: pip install 'mecha_exp[text]'. Or "
            "name a factory of the module with evaluator.module=FILE.py:function."
        )
    return folder_of(context, options)


def _kind(folder: ModelFolder, options: Options) -> str:
    """The class of transformers to build: that of the saved model, unless another one is named."""
    names = [options["kind"]] if options["kind"] else list(folder.config.get("architectures") or ())
    if not names:
        raise ConfigError(
            f"{folder.path / 'config.json'} does not say which class the model is of (architectures). Name "
            "it with evaluator.kind, such as evaluator.kind=AutoModelForCausalLM."
        )
    import transformers

    if not hasattr(transformers, names[0]):
        where = "evaluator.kind" if options["kind"] else f"{folder.path / 'config.json'}: architectures"
        raise ConfigError(
            f"{where}={names[0]}: transformers has no such class.{did_you_mean(names[0], dir(transformers))} "
            "Name one with evaluator.kind, or a factory with evaluator.module=FILE.py:function."
        )
    return str(names[0])


def _references(context: Context, options: Options) -> dict[str, Path]:
    """The inputs to compare with, by name."""
    names = options["references"]
    if names is not None and not isinstance(names, list | tuple):
        raise ConfigError(f"evaluator.references={names}: expected a list of inputs, as in [{names}].")
    for name in names or ():
        if name not in context.inputs:
            known = sorted(context.inputs)
            raise ConfigError(
                f"evaluator.references: there is no input '{name}'.{did_you_mean(name, known)} "
                f"There are {some(known)}."
            )
    chosen = {name: path for name, path in context.inputs.items() if names is None or name in names}
    if not chosen:
        raise ConfigError("evaluator=forward compares with inputs, and there is none.")
    return chosen


def _of_input(context: Context, name: str) -> Context:
    """The context in which an input finds its own configuration."""
    return Context(name, inputs={name: context.inputs[name], **context.inputs}, offline=context.offline)


def _depends(context: Context, options: Options) -> dict[str, Any]:
    inputs = _references(context, options)
    if options["module"] is not None:
        return {"inputs": inputs, "module": user_function(options["module"], "module")}
    contents = {name: _folder(_of_input(context, name), options).contents for name in inputs}
    own, library = _folder(context, options).contents, version("transformers")
    return {"inputs": inputs, "contents": contents, "model": own, "transformers": library}


@evaluator(
    "forward",
    metric="agreement",
    units={"agreement": "fraction, mean over inputs", "kl": "nats, mean over inputs"},
    libraries=("torch",),
    extra="text",
    check=_check,
    depends=_depends,
    takes_examples=True,
)
def forward(
    state_dict: Mapping[str, Tensor],
    *,
    context: Context,
    data: Path,
    module: str | None = None,
    kind: str | None = None,
    output: str | int | None = None,
    references: str | Sequence[str] | None = None,
    batch_size: int = 8,
    model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    examples: Mapping[str, list[int]] | None = None,
) -> Measurement:
    """Measure how a model's answers to a batch differ from those of its inputs; needs no labels.

    A position of the logits [rows, ..., classes] agrees where both largest entries are at the same place. Its
    divergence is KL(p || q) = sum p (log p - log q), with p of the input and q of the model, in float64.
    Positions that `attention_mask` hides do not count where it has the shape of the positions.

    Args:
        state_dict: the weights.
        context: the inputs; each is run once, and its logits are held in memory.
        data: a `.pt`, `.npz` or `.safetensors` file with tensors by the names of the forward's parameters,
            whose first axis are the rows. Floating ones are cast to the dtype of the network.
        module: `FILE.py:function`, a function without arguments to a `torch.nn.Module` whose state dict has
            the keys of the model; None is the model of transformers that the input's `config.json` describes.
        kind: a class of transformers; None is the one in `config.json`.
        output: the name, or place, of the logits in what the module returns; None is a tensor, or `logits`.
        references: names of the inputs to compare with; None is all.
        batch_size: rows at once.
        model: a folder or a hub's name whose configuration is used in place of the inputs'.
        device: `auto`, `cpu`, `cuda:1`.
        dtype: of the network; `auto` is that of the weights.
        trust_remote_code: whether code in the model's folder may be run.
        examples: the positions of the rows to measure, the same for each input; None is all.

    Returns:
        For each input and row the share of positions that agree, and the mean divergence of its positions;
        the numbers are `agreement/INPUT` and `kl/INPUT`, means over rows, and `agreement` and `kl`, means
        over inputs.

    Raises:
        ConfigError: batch, module and weights do not fit together.
        EvaluationError: a logit is NaN or infinite.
    """
    options = {**locals()}
    batch = read_batch(data)
    inputs = {name: _answers(_input(context, name, options)) for name in _references(context, options)}
    shares: dict[str, list[float]] = {name: [] for name in inputs}
    nats: dict[str, list[float]] = {name: [] for name in inputs}
    names = sorted(inputs)  # an order for all that asks the same
    rows = _rows(examples, len(next(iter(batch.values()))))
    with _network(state_dict, context, options) as built:

        def measure(part: list[int]) -> list[float]:
            chosen = {name: tensor[part] for name, tensor in batch.items()}
            [(ours, counts)] = batch_logits(built, chosen, batch_size, output, data)
            answers = [_of_rows(inputs[name], part, batch_size).to(ours.device) for name in names]
            for name, there in zip(names, answers, strict=True):
                if there.shape != ours.shape:
                    raise ConfigError(
                        f"the logits of '{name}' have shape {list(there.shape)}, and those of the model "
                        f"{list(ours.shape)}: they cannot be compared. Choose inputs with "
                        "evaluator.references."
                    )
            compared = [compare(there, ours, counts) for there in answers]
            return torch.stack([numbers for pair in compared for numbers in pair]).flatten().tolist()

        parts = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        for part in context.in_parts("rows", parts, measure):
            for name, pair in zip(names, np.array(part).reshape(len(inputs), 2, -1), strict=True):
                shares[name] += pair[0].tolist()
                nats[name] += pair[1].tolist()
    named = {name: [str(row) for row in rows] for name in inputs}
    sources = {name: [f"row {row}" for row in rows] for name in inputs}  # of all inputs one

    def outcomes(values: Mapping[str, list[float]]) -> Outcomes:
        return Outcomes(values, examples=named, clusters=sources)

    divergences = outcomes(nats)
    return Measurement(divergences.means("kl"), outcomes(shares), further={"kl": divergences})


def _rows(examples: Mapping[str, list[int]] | None, count: int) -> list[int]:
    """The rows to measure, which are the same for each input."""
    if examples is None:
        return list(range(count))
    return sorted(set().union(*examples.values()))


def _of_rows(batches: list[Tensor], rows: list[int], size: int) -> Tensor:
    """The logits of some rows, from those of batches of a size."""
    return torch.stack([batches[row // size][row % size] for row in rows])


@dataclass(frozen=True)
class _Input:
    """An input whose logits are wanted: equal where they are the same.

    Attributes:
        name: of the input.
        key: what decides its logits.
        context: in which it finds its configuration.
        options: of the evaluator.
    """

    name: str
    key: tuple[Any, ...]
    context: Context = field(compare=False)
    options: Options = field(compare=False)


def _input(context: Context, name: str, options: Options) -> _Input:
    path, data = context.inputs[name], options["data"]
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files += [data, *([function_file(options["module"], "module")[0]] if options["module"] else [])]
    versions = [(file.resolve(), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    chosen = ("module", "kind", "output", "batch_size", "model", "device", "dtype", "trust_remote_code")
    key = (*versions, *(options[name] for name in chosen))
    return _Input(name, key, _of_input(context, name), options)


@lru_cache(maxsize=64)
def _answers(asked: _Input) -> list[Tensor]:
    """The logits of an input, computed once, in the memory of the CPU."""
    options = asked.options
    weights = load_state_dict(asked.context.inputs[asked.name])
    batch = read_batch(options["data"])
    try:
        with _network(weights, asked.context, options) as built:
            parts = batch_logits(built, batch, options["batch_size"], options["output"], options["data"])
            return [logits.cpu() for logits, _ in parts]
    except (ConfigError, EvaluationError) as error:
        raise type(error)(f"the input '{asked.name}': {error}") from error


def _network(weights: Weights, context: Context, options: Options) -> AbstractContextManager[nn.Module]:
    """The network with these weights."""
    if options["module"] is None:
        folder = _folder(context, options)
        kind = _kind(folder, options)
        return network(folder, weights, kind, device=options["device"], dtype=options["dtype"])
    if options["dtype"] != AUTO:
        number = chosen_dtype(options["dtype"], weights, {})
        weights = {k: t.to(number) if t.is_floating_point() else t for k, t in weights.items()}
    path, _ = function_file(options["module"], "module")
    make = user_function(options["module"], "module")
    changed = (path, path.stat().st_mtime_ns, options["dtype"])
    return module_network(make, weights, name=options["module"], version=changed, device=options["device"])
