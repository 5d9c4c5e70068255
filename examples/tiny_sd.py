"""Writes a tiny Stable Diffusion and two fine-tunes of it as folders of diffusers: seconds on a CPU.

    python -m mecha_exp.examples.tiny_sd sd

writes the pipelines `sd/base`, `sd/photos` and `sd/drawings`, and `sd/prompts.txt`. Their weights are random
numbers, the fine-tunes' a few steps away from the base's, so the pictures are patterns: they show how to
sweep and to look, and not what a method is worth. It needs `mecha_exp[images]`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

PROMPTS = ("a photo of a cat", "a drawing of a house")
WIDTH, SIDE = 16, 16
"""The width of the text encoder, and the sides of the latent pictures."""
CHANGED = 0.35
"""How far the weights of a fine-tune are from those of the base, in units of these."""


def write(folder: Path) -> None:
    """Make the base and change its UNet twice."""
    import diffusers
    import transformers

    diffusers.logging.disable_progress_bar()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    pipeline = _pipeline()
    start = {key: value.clone() for key, value in pipeline.unet.state_dict().items()}
    for seed, name in enumerate(("base", "photos", "drawings")):
        torch.manual_seed(seed)
        size = CHANGED if seed else 0.0
        changed = {key: value * (1 + size * torch.randn_like(value)) for key, value in start.items()}
        pipeline.unet.load_state_dict(changed)
        pipeline.save_pretrained(folder / name)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")


def _pipeline() -> Any:
    """A Stable Diffusion of a few channels, which makes pictures of 32 x 32 pixels."""
    import diffusers
    import transformers

    tokenizer = _tokenizer()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": WIDTH, "intermediate_size": 32}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=tokenizer.model_max_length,
        pad_token_id=ends["eos_token_id"],
        **ends,
        **sizes,
    )
    unet = diffusers.UNet2DConditionModel(
        sample_size=SIDE,
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=4,
        sample_size=2 * SIDE,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    return diffusers.StableDiffusionPipeline(
        vae=vae,
        unet=unet,
        text_encoder=transformers.CLIPTextModel(text),
        tokenizer=tokenizer,
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _tokenizer() -> Any:
    """A tokenizer of the words of the prompts."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<s>", "</s>", *sorted({word for prompt in PROMPTS for word in prompt.split()})]
    tokens = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[*tokens.items()][:2]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "model_max_length": 16}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a tiny Stable Diffusion and two fine-tunes of it.")
    parser.add_argument("folder", type=Path, help="where the pipelines are written")
    write(parser.parse_args().folder)
