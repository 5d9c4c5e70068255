"""The architectures as diffusers and transformers define them: the names and shapes of their tensors.

Models are made from their published sizes on torch's meta device, so that they take no memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderKL, FluxTransformer2DModel, SD3Transformer2DModel
from transformers.core_model_loading import revert_weight_conversion

Shapes = dict[str, tuple[int, ...]]
FILES = Path(__file__).resolve().parent.parent / "model_configs" / "files"
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "projection_dim": 768}
CLIP_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "projection_dim": 1280}
PATCHED = {"image_size": 224, "patch_size": 16}


def shapes_of(model: torch.nn.Module) -> Shapes:
    """What a model has, by the names that its files have: transformers 5 names some otherwise in memory."""
    tensors = model.state_dict()
    if isinstance(model, transformers.PreTrainedModel):
        tensors = revert_weight_conversion(model, tensors)
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def built_from(name: str) -> Shapes:
    """The model that a folder of a built-in config holds, made from the configuration that lies beside it."""
    config = json.loads((FILES / name / "config.json").read_text(encoding="utf-8"))
    if "_class_name" in config:
        return shapes_of(getattr(diffusers, config["_class_name"]).from_config(config))
    [word] = config["architectures"]
    return shapes_of(getattr(transformers, word)(transformers.CLIPTextConfig(**config)))


def unet_sd1() -> Shapes:
    """Stable Diffusion 1's UNet."""
    return built_from("sd1-diffusers/unet")


def unet_sdxl() -> Shapes:
    """Stable Diffusion XL's UNet."""
    return built_from("sdxl-diffusers/unet")


def vae(channels: int = 4, quantised: bool = True) -> Shapes:
    """The autoencoder of Stable Diffusion 1 and XL; with 16 channels and not quantised that of 3 and Flux."""
    return shapes_of(
        AutoencoderKL(
            latent_channels=channels,
            use_quant_conv=quantised,
            use_post_quant_conv=quantised,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        )
    )


def sd3() -> Shapes:
    """Stable Diffusion 3 medium's transformer."""
    return shapes_of(
        SD3Transformer2DModel(
            sample_size=128,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=24,
            attention_head_dim=64,
            num_attention_heads=24,
            caption_projection_dim=1536,
            joint_attention_dim=4096,
            pooled_projection_dim=2048,
            pos_embed_max_size=192,
        )
    )


def flux(guidance: bool) -> Shapes:
    """The transformer of Flux: dev is told how strong the guidance is, schnell is not."""
    return shapes_of(FluxTransformer2DModel(guidance_embeds=guidance))


TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": ("FluxTransformer2DModel", {"guidance_embeds": True}),
    "chroma": ("ChromaTransformer2DModel", {}),
    "sd3.5_large": (
        "SD3Transformer2DModel",
        {
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
        }
        | {"qk_norm": "rms_norm"},
    ),
    "sd3.5_medium": (
        "SD3Transformer2DModel",
        {
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 384,
        }
        | {"qk_norm": "rms_norm", "dual_attention_layers": tuple(range(13))},
    ),
    "qwen_image": ("QwenImageTransformer2DModel", {}),
    "wan": ("WanTransformer3DModel", {"image_dim": 1280, "added_kv_proj_dim": 5120, "in_channels": 36}),
    "hidream": (
        "HiDreamImageTransformer2DModel",
        {"patch_size": 2, "in_channels": 16, "out_channels": 16, "caption_channels": [4096, 4096]}
        | {"llama_layers": [*range(32), *[31] * 16]},
    ),
    "lumina2": ("Lumina2Transformer2DModel", {"cap_feat_dim": 2304}),
    "pixart": ("PixArtTransformer2DModel", {"caption_channels": 4096}),
    "auraflow": ("AuraFlowTransformer2DModel", {"pos_embed_max_size": 9216}),
    "hunyuan_video": ("HunyuanVideoTransformer3DModel", {}),
    "ltx": ("LTXVideoTransformer3DModel", {}),
}
"""The class of each diffusion transformer, and its published configuration where that is not the default."""


def transformer(name: str) -> Shapes:
    """A diffusion transformer of its published size."""
    kind, sizes = TRANSFORMERS[name]
    return shapes_of(getattr(diffusers, kind)(**sizes))


def clip(**sizes: int) -> Shapes:
    """CLIP's text model with its projection; that of ViT-L unless sizes say otherwise."""
    config = transformers.CLIPTextConfig(**{**CLIP_L, **sizes})
    return shapes_of(transformers.CLIPTextModelWithProjection(config))


def t5() -> Shapes:
    """The encoder of T5 v1.1 XXL, without the second name of its embedding."""
    config = transformers.T5Config(
        d_model=4096, d_kv=64, num_heads=64, d_ff=10240, num_layers=24, feed_forward_proj="gated-gelu"
    )
    shapes = shapes_of(transformers.T5EncoderModel(config))
    shapes.pop("encoder.embed_tokens.weight")
    return shapes


def bert(kind: str, **sizes: Any) -> Shapes:
    """BERT with one of its heads: `BertForPreTraining`."""
    return shapes_of(getattr(transformers, kind)(transformers.BertConfig(**sizes)))


def llama(**sizes: int) -> Shapes:
    """Llama with its output layer."""
    return shapes_of(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))


def mixture(family: str, **sizes: Any) -> Shapes:
    """A mixture of experts with its output layer: `Mixtral`, `Qwen3Moe`.

    By the names that the library has in memory: files have them after `save_pretrained(...,
    save_original_format=False)`. gpt-oss and others always have them.
    """
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def vit(kind: str = "ViTForImageClassification", **sizes: Any) -> Shapes:
    """The vision transformer, with a classifier or without one."""
    return shapes_of(getattr(transformers, kind)(transformers.ViTConfig(**PATCHED, **sizes)))


def vit_with_mask() -> Shapes:
    """The vision transformer that was trained to fill in masked patches, with its pooler."""
    return shapes_of(transformers.ViTModel(transformers.ViTConfig(**PATCHED), use_mask_token=True))


def below(prefix: str, shapes: Shapes) -> Shapes:
    """The same as a part of a whole model."""
    return {prefix + key: shape for key, shape in shapes.items()}
