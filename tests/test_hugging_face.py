"""What is merged into a folder is loaded by transformers and diffusers, and runs.

Run by `make hf`, which installs the libraries. The models are tiny, of random weights, made from configs.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp import Job, merge_many, weighted_sum
from mecha_exp.architectures import resolve

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = torch.tensor([[1, 5, 7, 2]])


def bert(seed: int):
    torch.manual_seed(seed)
    return transformers.BertModel(transformers.BertConfig(vocab_size=40, **SMALL)).eval()


def llama(seed: int, tied: bool = False):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(vocab_size=40, tie_word_embeddings=tied, **SMALL)
    return transformers.LlamaForCausalLM(config).eval()


def vit(seed: int):
    torch.manual_seed(seed)
    return transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=8, **SMALL)).eval()


def unet(seed: int):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(seed)
    return diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=8,
        norm_num_groups=4, attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip


INPUTS = {
    bert: {"input_ids": TOKENS},
    llama: {"input_ids": TOKENS},
    vit: {"pixel_values": torch.ones(1, 3, 16, 16)},
    unet: {
        "sample": torch.ones(1, 4, 8, 8),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": torch.ones(1, 2, 8),
    },
}


@torch.no_grad()
def answer(model, make) -> torch.Tensor:
    return model(**INPUTS[make])[0]


@pytest.mark.parametrize("shard_size", [None, 10_000])
@pytest.mark.parametrize("make", INPUTS)
def test_a_merged_model_is_loaded_and_runs(make, shard_size, tmp_path: Path):
    a, b = make(1), make(2)
    a.save_pretrained(tmp_path / "a")
    b.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    recipe = weighted_sum(tmp_path / "a", tmp_path / "b", alpha=0.25)

    merge_many([Job(recipe, tmp_path / "merged", shard_size=shard_size)])

    merged = type(a).from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        for mine, theirs in zip(a.parameters(), b.parameters(), strict=True):
            mine.lerp_(theirs, 0.25)
    assert torch.allclose(answer(merged, make), answer(a, make), atol=1e-5)
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) == 1 or shard_size


def test_the_points_of_a_sweep_over_folders_are_loaded_with_their_tokenizers(as_a_user, tmp_path: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"w{i}": i for i in range(1, 40)}}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, seed in (("a", 1), ("b", 2)):
        bert(seed).save_pretrained(tmp_path / name)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / name)
    words = ("recipe=weighted_sum", "models.base=a", "models.experts=[b]", "alpha=0.25,0.5", "evaluator=none")

    outcome = as_a_user(*words, "tracking=none", "-m", cwd=tmp_path)

    assert outcome.status == 0, outcome.err
    (sweep,) = (tmp_path / "outputs" / "multiruns").iterdir()
    key = "encoder.layer.0.output.dense.weight"
    a, b = bert(1).state_dict()[key], bert(2).state_dict()[key]
    for point, alpha in (("0", 0.25), ("1", 0.5)):
        merged = transformers.AutoModel.from_pretrained(sweep / point / "model")
        assert torch.allclose(merged.state_dict()[key], torch.lerp(a, b, alpha), atol=1e-6)
        loaded = transformers.AutoTokenizer.from_pretrained(sweep / point / "model")
        assert loaded("w3 w5")["input_ids"] == [3, 5]


def test_a_tied_model_that_was_untied_is_loaded_with_an_output_layer_of_its_own(tmp_path: Path):
    from mecha_exp import EngineOptions

    a, b = llama(1, tied=True), llama(2)
    for name, model in (("a", a), ("b", b)):
        model.save_pretrained(tmp_path / name)
    recipe = weighted_sum(tmp_path / "a", tmp_path / "b", alpha=0.5)

    merge_many([Job(recipe, tmp_path / "merged")], EngineOptions(on_tied="untie"))

    merged = type(a).from_pretrained(tmp_path / "merged")
    expected = (a.model.embed_tokens.weight + b.lm_head.weight) / 2
    assert torch.allclose(merged.lm_head.weight, expected, atol=1e-6)
    assert not torch.allclose(merged.lm_head.weight, merged.model.embed_tokens.weight, atol=1e-3)


def test_the_dtype_of_the_weights_is_the_one_they_are_loaded_in(tmp_path: Path):
    for name, seed in (("a", 1), ("b", 2)):
        llama(seed).save_pretrained(tmp_path / name)
    recipe = weighted_sum(tmp_path / "a", tmp_path / "b", alpha=0.5)

    merge_many([Job(recipe, tmp_path / "merged", dtype=torch.bfloat16)])

    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert loaded.lm_head.weight.dtype == torch.bfloat16


def test_the_built_in_configs_are_the_architectures_of_the_libraries():
    pytest.importorskip("diffusers")
    script = Path(__file__).parents[1] / ".ci" / "model_configs.py"

    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)

    assert done.stdout.endswith("configs: no differences\n"), done.stdout[-2000:] + done.stderr[-2000:]
    assert done.returncode == 0


def test_a_single_file_that_was_converted_is_loaded_from_its_folder(tmp_path: Path):
    diffusers = pytest.importorskip("diffusers")
    generator = torch.Generator().manual_seed(0)
    parts = {name: resolve("sd1-ldm").components()[name] for name in ("clip_l", "vae")}
    file = {
        key: torch.rand(info.shape, generator=generator).mul(0.02).half()
        for part in parts.values()
        for key, info in part.items()
        if not info.optional
    }
    save_file(file, tmp_path / "parts.safetensors")
    folder = tmp_path / "folder"

    command = [sys.executable, "-m", "mecha_exp", "convert", tmp_path / "parts.safetensors"]
    subprocess.run([*command, "--to", "sd1-diffusers", "--config", "sd1-ldm", "-o", folder], check=True)

    vae = diffusers.AutoencoderKL.from_pretrained(folder, subfolder="vae", torch_dtype=torch.float16)
    clip = transformers.CLIPTextModel.from_pretrained(folder, subfolder="text_encoder", dtype=torch.float16)
    theirs, ours = vae.state_dict(), "first_stage_model.decoder.mid.attn_1.q.weight"
    assert torch.equal(theirs["decoder.mid_block.attentions.0.to_q.weight"], file[ours][:, :, 0, 0])
    norms = [value for key, value in clip.state_dict().items() if key.endswith("final_layer_norm.weight")]
    assert torch.equal(norms[0], file["cond_stage_model.transformer.text_model.final_layer_norm.weight"])
    assert vae.float().decode(torch.ones(1, 4, 2, 2)).sample.shape == (1, 3, 16, 16)
    assert clip.float()(torch.tensor([[1, 2]])).last_hidden_state.shape == (1, 2, 768)
