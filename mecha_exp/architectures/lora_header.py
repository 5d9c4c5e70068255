"""What the header of a LoRA file says to programs that list such files, in kohya's and Stability's entries.

Source: kohya-ss/sd-scripts (networks/extract_lora_from_models.py, library/sai_model_spec.py; the versions in
library/model_util.py, sdxl_model_util.py, flux_utils.py and lumina_util.py); ModelSpec 1.0.1 of Stability AI.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from mecha_exp.architectures.config import ModelConfig
from mecha_exp.architectures.keys import KeyInfo
from mecha_exp.architectures.library.detection import candidates
from mecha_exp.architectures.lora import DOWN, LOKR, UP, AdapterConfig, Shape

BEGINNINGS = ("lora_", "lycoris_")
"""How the modules of files begin whose readers know these entries."""
_FLUX = "networks.lora_flux"
_STABILITY = "https://github.com/Stability-AI/generative-models"


@dataclass(frozen=True)
class _Known:
    """What a family is called.

    Attributes:
        version: in `ss_base_model_version`.
        architecture, implementation: in ModelSpec.
        resolution: of the images that it was trained on.
        module: of sd-scripts, which reads a LoRA with kohya's names.
    """

    version: str
    architecture: str
    implementation: str = "diffusers"
    resolution: int = 1024
    module: str = "networks.lora"


_KNOWN = {
    "sd1": _Known("sd_v1", "stable-diffusion-v1", resolution=512),
    "sdxl": _Known("sdxl_base_v1-0", "stable-diffusion-xl-v1-base", _STABILITY),
    "flux": _Known("flux1", "flux-1-dev", "https://github.com/black-forest-labs/flux", module=_FLUX),
    "chroma": _Known("chroma", "chroma", "https://huggingface.co/lodestones/Chroma", module=_FLUX),
    "lumina2": _Known(
        "lumina2", "lumina-2", "https://github.com/Alpha-VLLM/Lumina-Image-2.0", module="networks.lora_lumina"
    ),
}
"""By architecture of the model config; others have no names that are agreed on."""


def lora_header(
    shapes: Mapping[str, Shape],
    title: str,
    alpha_is_rank: bool = False,
    config: ModelConfig | None = None,
) -> dict[str, str]:
    """The entries for a file with these keys; none for one that is not named as kohya or LyCORIS name a LoRA.

    >>> lora_header({"lora_unet_a.lora_down.weight": (4, 9), "lora_unet_a.lora_up.weight": (9, 4)}, "a", True)
    {'ss_network_module': 'networks.lora', 'ss_network_dim': '4', 'ss_network_alpha': '4.0'}

    Args:
        title: of the model.
        alpha_is_rank: whether the alpha of each module is its rank; otherwise nothing is said of alphas.
        config: of the file, where the recipe tells; None: the one that the keys fit. A few modules of Stable
            Diffusion 1 fit XL, too.
    """
    if not shapes or not all(key.startswith(BEGINNINGS) for key in shapes):
        return {}
    known = _known(shapes, config)
    module = known.module if known else _Known.module
    return {**_network(shapes, alpha_is_rank, module), **(_model(known, title) if known else {})}


def _network(shapes: Mapping[str, Shape], alpha_is_rank: bool, module: str) -> dict[str, str]:
    """The module of sd-scripts that reads the file, with its settings."""
    suffixes = {suffix for key in shapes for suffix in (*LOKR, UP) if key.endswith(f".{suffix}")}
    is_kohya = suffixes == {UP} and all(key.startswith("lora_") for key in shapes)
    ranks = {key: shape[0] for key, shape in shapes.items() if key.endswith(f".{DOWN}")}
    linear = [rank for key, rank in ranks.items() if max(shapes[key][2:], default=1) == 1]
    kernels = [rank for key, rank in ranks.items() if max(shapes[key][2:], default=1) > 1]
    settings = {} if is_kohya else {"algo": "locon" if suffixes == {UP} else "lokr"}
    entries = {"ss_network_module": module if is_kohya else "lycoris.kohya"}
    if ranks:
        dim = max(linear or kernels)
        entries["ss_network_dim"] = str(dim)
        entries |= {"ss_network_alpha": str(float(dim))} if alpha_is_rank else {}
    if kernels:
        settings["conv_dim"] = str(max(kernels))
        settings |= {"conv_alpha": str(float(max(kernels)))} if alpha_is_rank else {}
    return {**entries, **({"ss_network_args": json.dumps(settings)} if settings else {})}


def _known(shapes: Mapping[str, Shape], config: ModelConfig | None) -> _Known | None:
    """What the file is for, where a model config tells."""
    infos = {key: KeyInfo(tuple(shape), "float32") for key, shape in shapes.items()}
    found = [config] if config is not None else [fit.config for fit in candidates(infos)]
    bases = {fit.base.architecture for fit in found if isinstance(fit, AdapterConfig)}
    return _KNOWN.get(min(bases)) if len(bases) == 1 else None


def _model(known: _Known, title: str) -> dict[str, str]:
    return {
        "ss_base_model_version": known.version,
        "ss_v2": "False",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{known.architecture}/lora",
        "modelspec.implementation": known.implementation,
        "modelspec.title": title,
        "modelspec.resolution": f"{known.resolution}x{known.resolution}",
    }
