"""Networks that are built once and take each model's tensors, as the library itself would load them."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import Context
from mecha_exp.evaluators.common import check_network, model_folder, module_network, network
from mecha_exp.evaluators.common.networks import _slot, places_of

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = torch.tensor([[1, 5, 7, 2]])


def llama(tied: bool, seed: int = 0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(vocab_size=40, tie_word_embeddings=tied, **SMALL)
    return transformers.LlamaForCausalLM(config).eval()


def gpt2(seed: int):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config).eval()


def mixtral(seed: int):
    """An architecture whose checkpoint names and tensors are not those of the module."""
    torch.manual_seed(seed)
    config = transformers.MixtralConfig(vocab_size=40, num_local_experts=2, num_key_value_heads=2, **SMALL)
    return transformers.MixtralForCausalLM(config).eval()


def bert(seed: int):
    torch.manual_seed(seed)
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=40, **SMALL)).eval()


MODELS = {
    "llama": lambda seed: llama(False, seed),
    "llama_tied": lambda seed: llama(True, seed),
    "gpt2": gpt2,
    "mixtral": mixtral,
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def enter(block) -> None:
    """Build a network and let it go."""
    with block:
        pass


@pytest.mark.parametrize("name", MODELS)
def test_each_model_gives_the_logits_that_the_library_gives(name: str, tmp_path: Path):
    folder = None
    for seed in (1, 2, 1):
        MODELS[name](seed).save_pretrained(tmp_path / str(seed))
        folder = folder or model_folder(Context(inputs={"a": tmp_path / str(seed)}))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(seed)).eval()

        with network(folder, weights(tmp_path / str(seed)), "AutoModelForCausalLM") as module:
            logits = module(TOKENS).logits

        assert torch.equal(logits, loaded(TOKENS).logits)


def test_a_network_whose_keys_the_library_renames_is_built_once(tmp_path: Path, monkeypatch):
    from tiny_vision import save_vit

    from mecha_exp.evaluators.common.loading import Loader

    _slot.cache_clear()
    loaded, load = [], Loader.load
    monkeypatch.setattr(Loader, "load", lambda self, given: loaded.append(self.kind) or load(self, given))
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for seed in (1, 2, 1):
        folder = save_vit(tmp_path / str(seed), seed)
        theirs = transformers.ViTForImageClassification.from_pretrained(folder).eval()

        with network(
            model_folder(Context(inputs={"a": tmp_path / "1"})),
            weights(folder),
            "AutoModelForImageClassification",
        ) as module:
            assert torch.equal(module(pixels).logits, theirs(pixels).logits)

    assert loaded == ["AutoModelForImageClassification"]


def test_a_tensor_that_is_turned_in_place_is_not_the_stored_one():
    weight = torch.arange(9.0).reshape(3, 3)
    layer = torch.nn.Linear(3, 3, bias=False)
    layer.load_state_dict({"weight": weight.T}, assign=True)

    assert layer.weight.data_ptr() == weight.data_ptr()
    assert places_of(layer, {"weight": weight}) is None
    assert places_of(layer, {"weight": weight.T}) == {"weight": "weight"}


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_are_shared_and_let_go(tied: bool, tmp_path: Path):
    llama(tied).save_pretrained(tmp_path)
    folder, state_dict = model_folder(Context(inputs={"a": tmp_path})), weights(tmp_path)
    _slot.cache_clear()

    for _ in range(2):
        with network(folder, state_dict, "AutoModelForCausalLM") as module:
            own = module.state_dict()
            assert all(own[key].data_ptr() == tensor.data_ptr() for key, tensor in state_dict.items())
        assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}

    assert _slot.cache_info().misses == 1


def test_a_base_model_fits_a_network_with_a_head_but_for_the_head(tmp_path: Path):
    bert(1).bert.save_pretrained(tmp_path)
    folder = model_folder(Context(inputs={"a": tmp_path / "model.safetensors"}))

    with pytest.raises(ConfigError) as error:
        enter(network(folder, weights(tmp_path), "AutoModelForMaskedLM"))

    assert "it lacks cls.predictions." in str(error.value)
    with network(folder, weights(tmp_path), absent=("pooler.",)) as module:
        assert module(TOKENS).last_hidden_state.isfinite().all()


def _with(folder: Path, **entries: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight"),
        ({"num_hidden_layers": 3}, "it lacks model.layers.2."),
        ({"intermediate_size": 64}, "has shape [16, 32] instead of [16, 64]"),
        ({"model_type": "lama"}, "config.json: The checkpoint you are trying to load has model type `lama`"),
    ],
)
def test_what_does_not_fit_is_named_before_a_weight_is_read(change, message: str, tmp_path: Path):
    llama(False).save_pretrained(tmp_path)
    shapes = {key: tuple(tensor.shape) for key, tensor in weights(tmp_path).items()}
    check_network(model_folder(Context(inputs={"a": tmp_path})), shapes, "AutoModelForCausalLM")
    _with(tmp_path, **change)

    with pytest.raises(ConfigError) as error:
        check_network(model_folder(Context(inputs={"a": tmp_path})), shapes, "AutoModelForCausalLM")

    assert message in str(error.value)


def test_unused_keys_are_errors_unless_they_are_named(tmp_path: Path):
    llama(False).save_pretrained(tmp_path)
    folder, state_dict = model_folder(Context(inputs={"a": tmp_path})), weights(tmp_path)

    more = {**state_dict, "head2.weight": torch.ones(2)}

    with pytest.raises(ConfigError, match=r"head2\.weight has no place in the network"):
        enter(network(folder, more, "AutoModelForCausalLM"))
    with network(folder, more, "AutoModelForCausalLM", unused=("head2.",)) as module:
        assert module(TOKENS).logits.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:7"}, "evaluator.device=cuda:7: torch sees no GPU here. Use evaluator.device=cpu"),
        ({"device": "gpu"}, "evaluator.device=gpu: unknown device. Did you mean 'cpu'?"),
        ({"dtype": "float31"}, "evaluator.dtype=float31: unknown dtype. Did you mean 'float32'"),
    ],
)
def test_devices_and_dtypes_that_are_not_there(settings, message: str, tmp_path: Path):
    llama(False).save_pretrained(tmp_path)
    folder = model_folder(Context(inputs={"a": tmp_path}))

    with pytest.raises(ConfigError) as error:
        check_network(folder, {}, "AutoModelForCausalLM", **settings)

    assert message in str(error.value)


@pytest.mark.parametrize(
    ("dtype", "bytes_needed"), [("auto", 25_920), ("bfloat16", 12_960), ("float64", 51_840)]
)
def test_a_gpu_that_is_too_small_is_an_error_with_both_sizes(
    dtype, bytes_needed, tmp_path: Path, monkeypatch
):
    llama(False).save_pretrained(tmp_path)
    folder = model_folder(Context(inputs={"a": tmp_path}))
    shapes = {key: tuple(tensor.shape) for key, tensor in weights(tmp_path).items()}
    assert sum(math.prod(shape) for shape in shapes.values()) * 4 == 25_920
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9_000 + device.index, 80_000_000_000))

    with pytest.raises(ConfigError) as error:
        check_network(folder, shapes, "AutoModelForCausalLM", device="cuda:1", dtype=dtype)
    with pytest.raises(ConfigError, match=r"evaluator\.device=cuda:2: torch sees 2 GPUs here"):
        check_network(folder, shapes, "AutoModelForCausalLM", device="cuda:2", dtype=dtype)

    assert str(error.value).startswith(
        f"evaluator.device=cuda:1: the weights need {bytes_needed:,} bytes, and 9,001 are free there. Use "
    )


def test_auto_counts_the_bytes_of_the_weights_where_the_configuration_names_another_dtype(
    tmp_path: Path, monkeypatch
):
    llama(False).save_pretrained(tmp_path)
    _with(tmp_path, dtype="bfloat16")
    context = Context(inputs={"a": tmp_path}, devices=("", ""))
    shapes = {key: tuple(tensor.shape) for key, tensor in weights(tmp_path).items()}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40_000, 80_000_000_000))

    with pytest.raises(ConfigError, match=r"the weights of 2 workers need 51,840 bytes, and 40,000 are free"):
        check_network(model_folder(context), shapes, "AutoModelForCausalLM", device="cuda:0", context=context)


def test_the_network_computes_in_the_dtype_of_the_weights_or_in_another(tmp_path: Path):
    llama(True).to(torch.bfloat16).save_pretrained(tmp_path)
    folder, state_dict = model_folder(Context(inputs={"a": tmp_path})), weights(tmp_path)

    for dtype, number in (("auto", torch.bfloat16), ("float32", torch.float32)):
        for _ in range(2):
            with network(folder, state_dict, "AutoModelForCausalLM", dtype=dtype) as module:
                assert module(TOKENS).logits.dtype == number


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("scale", torch.full((2,), 2.0), persistent=False)

    def forward(self, x):
        return self.layer(x) * self.scale


def test_a_module_of_a_factory_takes_tensors_by_their_names():
    for seed in (1, 2):
        torch.manual_seed(seed)
        tiny, x = Tiny(), torch.randn(4, 3)
        with module_network(Tiny, dict(tiny.state_dict()), name="tiny.py:Tiny") as module:
            assert torch.equal(module(x), tiny(x))

    with pytest.raises(
        ConfigError, match=r"does not fit tiny:Tiny: it lacks layer\.bias; other has no place"
    ):
        enter(module_network(Tiny, {"layer.weight": torch.ones(2, 3), "other": x}, name="tiny:Tiny"))
