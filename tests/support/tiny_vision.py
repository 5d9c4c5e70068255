"""Tiny vision models in folders, as transformers saves them: a ViT classifier, a CLIP with its tokenizer."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SIDE = 16
WORDS = ("<s>", "</s>", "a", "photo", "of", "the", ".", "cat", "dog", "eel", "small", "drawing")
CLASSES = ("cat", "dog", "eel")


def save_vit(folder: Path, seed: int, classes: Sequence[str] = CLASSES, *, side: int = SIDE) -> Path:
    """A ViT that classifies pictures, with its processor."""
    import transformers

    torch.manual_seed(seed)
    labels = {"id2label": dict(enumerate(classes)), "label2id": {c: i for i, c in enumerate(classes)}}
    config = transformers.ViTConfig(image_size=SIDE, patch_size=8, **SMALL, **labels, initializer_range=0.5)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    size = {"height": side, "width": side}
    transformers.ViTImageProcessor(size=size).save_pretrained(folder)
    return folder


def save_clip(folder: Path, seed: int, kind: str = "CLIPModel") -> Path:
    """A CLIP, or a tower of it, with its processor and its tokenizer."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(seed)
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "model_max_length": 12}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    text = {"vocab_size": len(WORDS), "max_position_embeddings": 12, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.CLIPConfig(
        text_config={**SMALL, **text, "pad_token_id": 1},
        vision_config={**SMALL, "image_size": SIDE, "patch_size": 8},
        projection_dim=12,
        initializer_factor=20.0,
    )
    model = getattr(transformers, kind)
    model(config if kind == "CLIPModel" else config.vision_config).save_pretrained(folder)
    size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    transformers.CLIPImageProcessor(**size).save_pretrained(folder)
    return folder


def save_pipeline(folder: Path, seed: int, *, side: int = 8) -> Path:
    """A Stable Diffusion of a few channels."""
    import diffusers
    import transformers

    clip = save_clip(folder / "clip", seed)
    text = transformers.CLIPModel.from_pretrained(clip).config.text_config
    torch.manual_seed(seed)
    unet = diffusers.UNet2DConditionModel(
        sample_size=side, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=16,
        norm_num_groups=4, attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, sample_size=2 * side,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        vae=vae, unet=unet, text_encoder=transformers.CLIPTextModel(text),
        tokenizer=transformers.AutoTokenizer.from_pretrained(clip), scheduler=diffusers.DDIMScheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    shutil.rmtree(clip)
    pipeline.save_pretrained(folder)
    return folder
