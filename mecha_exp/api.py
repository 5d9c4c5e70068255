"""`merge` for scripts: the keywords of sd-mecha 1.1.8, translated to the engine's options."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Container, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mecha_exp.across import run_plan
from mecha_exp.cards import Settings, card_of
from mecha_exp.checkpoint import dtype_name, is_file_name, parse_size
from mecha_exp.conversion.shortest_path import convert
from mecha_exp.engine import EngineOptions, Job, MergeReport, Plan, plan
from mecha_exp.engine.constants import config_of_constants, constants, with_models
from mecha_exp.engine.planner.by_key import parse_output_dtype
from mecha_exp.engine.report import About
from mecha_exp.engine.runtime.context import Progress
from mecha_exp.errors import CheckpointError, ConfigError, MergeError, RecipeError, counted, some
from mecha_exp.graph.literals import as_node
from mecha_exp.graph.nodes import Node, models_of
from mecha_exp.graph.spaces import checked_spaces
from mecha_exp.numbers import is_whole
from mecha_exp.system.atomic_write import atomic_write
from mecha_exp.system.memory import peak_memory
from mecha_exp.system.progress import LoggedProgress, merge_summary, tqdm_progress

log = logging.getLogger("mecha_exp")

P = ParamSpec("P")
R = TypeVar("R")
StateDictOutput = MutableMapping[str, torch.Tensor]


def _without_ellipses(function: Callable[P, R]) -> Callable[P, R]:
    """Treat a keyword of value `...` as left out, as sd-mecha does."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        present: Any = {name: value for name, value in kwargs.items() if value is not ...}
        return function(*args, **present)

    return called


@_without_ellipses
def merge(
    recipe: Any,
    output: Path | str | StateDictOutput | None = None,
    options: EngineOptions | None = None,
    dtype: torch.dtype | None = None,
    *,
    fallback_model: Any = None,
    merge_device: str | torch.device | None = None,
    merge_dtype: torch.dtype | str | None = None,
    output_device: str | torch.device | None = None,
    output_dtype: torch.dtype | str | Mapping[str, Any] | None = None,
    threads: int | None = None,
    total_buffer_size: int | None = None,
    strict_merge_space: Any = ...,
    strict_mandatory_keys: bool | None = None,
    check_extra_keys: bool = True,
    check_finite_output: bool = True,
    omit_non_finite_inputs: bool | None = None,
    allow_empty_merge: bool = False,
    memoize_intermediates: bool = True,
    validate_mm_contract: bool = True,
    cache: Mapping[Node, Any] | None = None,
    tqdm: Callable[..., Any] | None = None,
    card: bool = True,
    shard_size: int | str | None = None,
    across: int | None = None,
) -> Path | StateDictOutput:
    """Merge a recipe into one model.

    Args:
        recipe: a graph, or a value that stands for one: a path, a state dict.
        output: the path of the file, or a dictionary to fill; None returns a new dictionary.
        options: of the engine; the keywords below override some of them.
        dtype: the same as `output_dtype`.
        fallback_model: the source of keys that the recipe has no value for.
        merge_device: the device of the arithmetic: the engine's `device`.
        merge_dtype: the dtype of the arithmetic, float32 or float64: the engine's `compute_dtype`.
        output_device: the device of the tensors of a dictionary.
        output_dtype: of the output, or by component, block or pattern of keys; None keeps the dtype that each
            key has in the first input.
        threads: the engine's `workers`; 0 means 1.
        strict_merge_space: the required merge space of the result; None allows any. By default a file
            requires `weight`, and a dictionary allows any.
        strict_mandatory_keys: whether a key that an input lacks is an error (the default) or is left out: the
            engine's `on_missing`.
        check_extra_keys: whether to warn of keys that are left out because their file's model config does not
            have them. The engine's `on_extra` merges them like the others, or makes them an error.
        check_finite_output: whether to warn of values that are not finite.
        omit_non_finite_inputs: whether a key with values that are not finite counts as missing from its
            input, or is merged as it is; None is the engine's `on_nonfinite`, which is an error.
        allow_empty_merge: whether a result without keys is allowed.
        cache: for each node the object that its method receives as `cache`, to be reused by later merges.
        tqdm: creates a progress bar with bytes, rate, time left and the current key, as `tqdm.tqdm` does;
            without it the log gets lines every few seconds, at the level INFO (see `set_log_level`).
        card: whether a folder gets a model card, README.md, for which the inputs are read once more; see
            `model_card`.
        shard_size: the most bytes of a file of a folder, as a number or as 5GB; None writes one file.
        across: how many processes or machines make the files of a folder: the engine's `across`, which its
            `cluster` tells where they are.
        total_buffer_size, memoize_intermediates, validate_mm_contract: accepted and ignored; see
            docs/migrating-from-sd-mecha.md.

    Returns:
        the path, or the merged state dict.

    Raises:
        MechaError: see `plan` and `merge_many`.

    >>> merge(weighted_sum("a.safetensors", "b.safetensors", alpha=0.3), "merged.safetensors")
    """
    node = as_node(recipe)
    _check_output(output)
    is_file = isinstance(output, str | os.PathLike)
    _check_space(node, strict_merge_space if strict_merge_space is not ... else "weight" if is_file else None)
    if fallback_model is not None:
        node = node | fallback_model
    options = _options(
        options or EngineOptions(),
        device=None if merge_device is None else str(merge_device),
        compute_dtype=merge_dtype,
        workers=None if threads is None else _workers(threads),
        across=across,
        on_missing=_choice(strict_mandatory_keys, "error", "skip"),
        on_nonfinite=_choice(omit_non_finite_inputs, "skip", "keep"),
    )
    target: Path | dict[str, torch.Tensor] = Path(output) if is_file else {}  # type: ignore[arg-type]
    if (config := config_of_constants(node)) is not None:
        node = with_models(node, config)
        if not models_of(node):
            return _constants(constants(node, config, options), target, output, output_device)
    made_as = parse_output_dtype(output_dtype if dtype is None else dtype)
    size = None if shard_size is None else parse_size(shard_size)
    make_card = card_of(node, lambda: Settings(options, made_as)) if card and _is_folder(target) else None
    job = Job(node, target, made_as, shard_size=size, card=make_card, caches=cache or {})
    report = _run(job, options, tqdm, allow_empty_merge)
    checked = {About.EXTRA_KEYS: check_extra_keys, About.NONFINITE_OUTPUT: check_finite_output}
    _warn(report, [about for about, is_checked in checked.items() if not is_checked])
    return target if isinstance(target, Path) else _to_output(target, output, output_device)


class Defaults:
    """Default keywords for several calls of `merge`.

    >>> mecha = Defaults(output_dtype=torch.float16)
    >>> mecha.merge(recipe, output="merged.safetensors")
    """

    def __init__(self, **keywords: Any) -> None:
        allowed = inspect.signature(merge).parameters.keys() - {"recipe"}
        for name in keywords:
            if name not in allowed:
                raise ConfigError(f"Defaults: merge has no keyword '{name}'")
        self.keywords = keywords

    def merge(self, recipe: Any, output: Any = None, **keywords: Any) -> Path | StateDictOutput:
        """Call `mecha_exp.merge` with these defaults."""
        own = {name: value for name, value in keywords.items() if value is not ...}
        target = {} if output is None or output is ... else {"output": output}
        return merge(recipe, **{**self.keywords, **own, **target})

    def convert(self, recipe: Any, config: Any) -> Node:
        """Call `mecha_exp.convert`."""
        return convert(recipe, config)


def set_log_level(level: str | int = "INFO") -> None:
    """Show this library's log messages of at least this level, such as "WARNING"."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    log.setLevel(level)


def _options(options: EngineOptions, **changes: Any) -> EngineOptions:
    requested = {name: value for name, value in changes.items() if value is not None}
    dtype = requested.get("compute_dtype")
    if isinstance(dtype, torch.dtype) and dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"merge_dtype: {dtype_name(dtype)} rounds every step of a merge, and alpha with it. Merge in "
            "float32 or float64, and say output_dtype to store another."
        )
    return replace(options, **requested)


def _choice(flag: bool | None, yes: str, no: str) -> str | None:
    return None if flag is None else yes if flag else no


def _workers(threads: int) -> int:
    if not is_whole(threads, least=0):
        raise ConfigError(f"threads: expected a whole number of at least 0, got {threads!r}")
    return max(threads, 1)


def _is_folder(target: Path | dict[str, torch.Tensor]) -> bool:
    return isinstance(target, Path) and not is_file_name(target)


def _check_output(output: Any) -> None:
    if output is not None and not isinstance(output, str | os.PathLike | MutableMapping):
        raise ConfigError(
            f"output: expected a path, a dictionary or None, got {type(output).__name__}. A module takes the "
            "result by module.load_state_dict(merge(recipe))."
        )


def _run(job: Job, options: EngineOptions, tqdm: Callable[..., Any] | None, allow_empty: bool) -> MergeReport:
    """Merge, and log what it took."""
    with plan([job], options) as planned, _progress(planned, tqdm) as progress:
        if not planned.layouts[0] and not allow_empty:
            raise MergeError(
                f"the recipe {job.recipe!r} gives no key. allow_empty_merge=True merges it all the same."
            )
        report = run_plan(planned, progress)
    summary = merge_summary(report.seconds, report.bytes_read, report.bytes_written, peak_memory())
    log.info("merged %s in %s", counted(report.keys, "key"), summary)
    return report


def _check_space(node: Node, requested: str | None) -> None:
    if requested is None:
        return
    (space,) = checked_spaces(requested)
    if node.merge_space != space:
        raise RecipeError(
            f"the recipe {node!r} gives a {node.merge_space}, not a {space}. If that is meant, merge with "
            f"strict_merge_space='{node.merge_space}'."
        )


def _progress(planned: Plan, tqdm: Callable[..., Any] | None) -> AbstractContextManager[Progress]:
    """A callback that reports the bytes read, to a progress bar or to the log."""
    if tqdm is None:
        return nullcontext(LoggedProgress(planned.bytes_read))
    return tqdm_progress(tqdm, planned.bytes_read)


def _constants(
    values: Mapping[str, Any], target: Any, output: Any, device: str | torch.device | None
) -> Path | StateDictOutput:
    """Deliver the values of a recipe without models; words stay words, and have no place in a file."""
    merged: dict[str, Any] = {
        key: value if isinstance(value, str) else torch.as_tensor(value) for key, value in values.items()
    }
    if not isinstance(target, Path):
        return _to_output(merged, output, device)
    if words := [key for key, value in merged.items() if isinstance(value, str)]:
        raise RecipeError(f"{some(words, 3)} are words, which a file of tensors does not hold.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as file:
            save_file({key: tensor.contiguous() for key, tensor in merged.items()}, file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target} cannot be written: {error}.") from None
    return target


def _warn(report: MergeReport, unwanted: Container[About]) -> None:
    for warning in report.warnings:
        if warning.about not in unwanted:
            log.warning(warning)


def _to_output(
    merged: dict[str, torch.Tensor], output: Any, device: str | torch.device | None
) -> StateDictOutput:
    """Move the merged tensors to the device, and into the caller's dictionary if there is one."""
    if device is not None:
        merged = {key: tensor.to(device) for key, tensor in merged.items()}
    if output is None:
        return merged
    output.update(merged)
    return output  # type: ignore[no-any-return]
