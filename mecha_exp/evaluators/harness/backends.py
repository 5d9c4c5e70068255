"""The models of lm-evaluation-harness that load a folder, and vllm, whose engine has processes of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

from mecha_exp.errors import ConfigError, EvaluationError, did_you_mean
from mecha_exp.evaluators.common.devices import AUTO

HF, VLLM, CPU = "hf", "vllm", "cpu"
_NO_START = (
    "Its own lines above say why. It takes most of the memory, on a CPU too: "
    "'evaluator.model_args={gpu_memory_utilization: 0.3}' leaves the rest to others."
)


def check_backend(backend: str) -> None:
    """Check that lm_eval has a model of this name.

    Raises:
        ConfigError: it has not.
    """
    import_module("lm_eval.models")  # registers its models
    from lm_eval.api.registry import model_registry

    if backend not in model_registry:
        raise ConfigError(
            f"evaluator.backend={backend}: lm_eval knows no such model."
            f"{did_you_mean(str(backend), [HF, VLLM, 'hf-auto'])}"
        )


def check_vllm(device: str) -> None:
    """Check that vllm is installed as lm_eval looks for it, and computes on the device.

    Raises:
        ConfigError: it is not, or does not.
    """
    try:
        version(VLLM)
    except PackageNotFoundError:
        raise ConfigError(_not_installed()) from None
    if device == CPU and (built := import_module("vllm.platforms").current_platform.device_type) != CPU:
        raise ConfigError(
            f"evaluator.device=cpu: the vllm that is installed computes on {built}. Leave "
            "evaluator.device out, or install a vllm that is built for CPUs."
        )
    if device not in (AUTO, CPU):
        raise ConfigError(
            f"evaluator.device={device}: vllm takes the GPUs that it sees. Name those with "
            f"evaluator.devices=[{device}] or the environment variable CUDA_VISIBLE_DEVICES."
        )


def _not_installed() -> str:
    if others := packages_distributions().get(VLLM):
        return (
            f"evaluator.backend=vllm: the module vllm is there by the package {others[0]}, and lm_eval asks "
            "for the version of a package vllm. docs/evaluators-language.md shows how to give it this name."
        )
    return "evaluator.backend=vllm needs vllm, which is not installed: pip install vllm"


@contextmanager
def started(backend: str, arguments: Mapping[str, Any], **more: Any) -> Iterator[Any]:
    """A model of lm_eval, as its command makes it. Processes and memory of vllm end with the block.

    Args:
        backend: its name in lm_eval.
        arguments: `--model_args` of the command, such as `pretrained`.
        more: `batch_size` and `device`.

    Raises:
        EvaluationError: the engine of vllm does not start.
    """
    from lm_eval.api.registry import get_model

    try:
        built = get_model(backend).create_from_arg_obj(dict(arguments), more)
    except RuntimeError as error:
        if backend != VLLM:
            raise
        raise EvaluationError(f"vllm cannot start: {error} {_NO_START}") from None
    try:
        yield built
    finally:
        if backend == VLLM and hasattr(built, "model"):  # without one, Ray's workers have it
            built.model.llm_engine.engine_core.shutdown()
