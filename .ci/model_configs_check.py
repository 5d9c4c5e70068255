"""What whole configs say otherwise than diffusers and transformers, part of `model_configs.py --check`.

A folder's config is compared with the models of the libraries themselves. A single file's keys, empty tensors
of the shapes that the config names, go through diffusers' own conversion of single files: what comes out must
be its model, key by key and shape by shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import library_models as models
import torch
from diffusers.loaders import single_file_utils as peer
from library_models import Shapes, below

from mecha_exp.architectures import KeyInfo, ModelConfig, resolve
from mecha_exp.architectures.library.detection import match

Tensors = dict[str, torch.Tensor]
Check = Callable[[ModelConfig], Iterable[str]]
Parts = dict[str, tuple[Shapes, Shapes]]
"""Of each part of a single file what diffusers makes of it, and the model that it belongs into."""

OF_OLD = ("position_ids", "logit_scale")
"""Optional keys that only older releases wrote, or other libraries."""
VAE = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}


def configs() -> Iterator[str]:
    """A line for each difference."""
    for identifier, make in CONFIGS.items():
        for line in make(resolve(identifier)):
            yield f"{identifier}: {line}"


def same_as(*libraries: Callable[[], Shapes]) -> Check:
    """Each of the models fits the config, and no key of the config is in none of them."""

    def compare(config: ModelConfig) -> Iterator[str]:
        seen: set[str] = set()
        for make in libraries:
            shapes = make()
            found = match({key: KeyInfo(shape, "float32") for key, shape in shapes.items()}, config)
            if found is None:
                yield f"a model of the library does not fit: {next(iter(shapes))}, ..."
                continue
            yield from (f"{key} is missing in the library" for key in (*found.missing, *found.absent))
            yield from (f"{key} is only in the library" for key in found.extra)
            seen |= {_unsized(found.renamed.get(key, key)) for key in shapes}
        known = {key for key in config.keys() if not key.endswith(OF_OLD)}
        yield from (f"{key} is in no model of the library" for key in known if _unsized(key) not in seen)

    return compare


def _unsized(key: str) -> str:
    """A key without its numbers: the members of a family have more and fewer layers."""
    return ".".join("#" if word.isdecimal() else word for word in key.split("."))


def same_parts_as(
    parts: Callable[[Tensors], Parts],
) -> Check:
    """What diffusers makes of a single file's keys is what its models have."""

    def compare(config: ModelConfig) -> Iterator[str]:
        tensors = {key: torch.empty(i.shape) for key, i in config.keys().items() if not i.optional}
        try:
            found = parts(tensors)
        except KeyError as error:
            yield f"diffusers looks for {error} and does not find it"
            return
        for part, (made, wanted) in found.items():
            for key in sorted(made.keys() | wanted.keys()):
                if made.get(key) != wanted.get(key):
                    yield f"{part}: {key}: {made.get(key)} from the config, {wanted.get(key)} in diffusers"

    return compare


def sd3(file: Tensors) -> Parts:
    """The parts of Stable Diffusion 3."""
    clip_g = models.clip(**models.CLIP_G)
    return {
        "clip_l": (_clip(file, "clip_l"), models.clip()),
        "clip_g": (_clip(file, "clip_g"), clip_g),
        **_t5_and_vae(file),
        "diffuser": (
            _shapes(peer.convert_sd3_transformer_checkpoint_to_diffusers(_diffuser(file))),
            models.sd3(),
        ),
    }


def flux(guidance: bool) -> Callable[[Tensors], Parts]:
    """The parts of Flux dev, or of schnell, which is not told how strong the guidance is."""

    def parts(file: Tensors) -> Parts:
        clip_l = {k: s for k, s in models.clip().items() if k != "text_projection.weight"}
        convert = peer.convert_flux_transformer_checkpoint_to_diffusers
        return {
            "clip_l": (_clip(file, "clip_l"), clip_l),
            "t5xxl": (_shapes(peer.convert_sd3_t5_checkpoint_to_diffusers(dict(file))), models.t5()),
            "vae": (
                _shapes(peer.convert_ldm_vae_checkpoint(dict(file), VAE)),
                models.vae(16, quantised=False),
            ),
            "diffuser": (_shapes(convert(_diffuser(file))), models.flux(guidance)),
        }

    return parts


def _t5_and_vae(file: Tensors) -> Parts:
    vae = peer.convert_ldm_vae_checkpoint(dict(file), VAE)
    return {
        "t5xxl": (_shapes(peer.convert_sd3_t5_checkpoint_to_diffusers(dict(file))), models.t5()),
        "vae": (_shapes(vae), models.vae(16, quantised=False)),
    }


def _clip(file: Tensors, name: str) -> Shapes:
    prefix = f"text_encoders.{name}.transformer."
    return _shapes(peer.convert_ldm_clip_checkpoint(dict(file), prefix))


def _diffuser(file: Tensors) -> Tensors:
    return {key: tensor for key, tensor in file.items() if key.startswith("model.diffusion_model.")}


def _shapes(tensors: Tensors) -> Shapes:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def folder(identifier: str) -> Callable[[], Shapes]:
    """The parts of a pipeline's folder, made from the configurations that are written beside them."""

    def parts() -> Shapes:
        names = sorted(path.parent.name for path in (models.FILES / identifier).glob("*/config.json"))
        found = [below(f"{name}.", models.built_from(f"{identifier}/{name}")) for name in names]
        return {key: shape for part in found for key, shape in part.items()}

    return parts


def alone(identifier: str) -> Callable[[], Shapes]:
    """The model of a folder that has no parts, made in the same way."""
    return lambda: models.built_from(identifier)


def mixtures(family: str, **sizes: Any) -> list[Callable[[], Shapes]]:
    """A model of a family of the library's own width, and one of other sizes; of few layers each."""
    return [
        lambda: models.mixture(family, num_hidden_layers=5),
        lambda: models.mixture(family, **{"num_hidden_layers": 4, "hidden_size": 1024, **sizes}),
    ]


CONFIGS: dict[str, Check] = {
    "bert-hf": same_as(
        lambda: models.bert("BertForPreTraining"),
        lambda: models.bert("BertForSequenceClassification", num_labels=5),
        lambda: models.bert("BertForQuestionAnswering", num_hidden_layers=24, hidden_size=1536),
        lambda: models.bert("BertModel", vocab_size=28996),
    ),
    "llama-hf": same_as(
        models.llama,
        lambda: models.llama(num_hidden_layers=16, hidden_size=2048, num_key_value_heads=8, head_dim=128),
    ),
    "mixtral-hf": same_as(*mixtures("Mixtral", num_local_experts=4)),
    "qwen2_moe-hf": same_as(*mixtures("Qwen2Moe", num_experts=4)),
    "qwen3_moe-hf": same_as(*mixtures("Qwen3Moe", num_experts=4)),
    "gpt_oss-hf": same_as(*mixtures("GptOss", num_local_experts=4)),
    "deepseek-hf": same_as(
        *mixtures("DeepseekV2", n_routed_experts=6),
        *mixtures("DeepseekV2", q_lora_rank=None, first_k_dense_replace=1),
        *mixtures("DeepseekV3", first_k_dense_replace=2),
    ),
    "vit-hf": same_as(models.vit, models.vit_with_mask, lambda: models.vit("ViTModel", num_hidden_layers=24)),
    "clip_l-hf": same_as(models.clip, alone("clip_l-hf")),
    "clip_g-hf": same_as(alone("clip_g-hf")),
    "vae-diffusers": same_as(alone("vae-diffusers")),
    "sd1-diffusers_unet_only": same_as(alone("sd1-diffusers_unet_only")),
    "sdxl-diffusers_unet_only": same_as(alone("sdxl-diffusers_unet_only")),
    "sd1-diffusers": same_as(folder("sd1-diffusers")),
    "sdxl-diffusers": same_as(folder("sdxl-diffusers")),
    "sd3-comfyui": same_parts_as(sd3),
    "flux-flux": same_parts_as(flux(guidance=True)),
    "flux_schnell-flux": same_parts_as(flux(guidance=False)),
}
