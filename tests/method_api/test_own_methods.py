"""Merge methods as a user writes them: keys, other keys, seeds, groups of keys, interfaces, conversions."""

import time
from typing import TypeVar

import pytest
import torch
from state_dicts import contents
from torch import Tensor

import mecha_exp
from mecha_exp import (
    MergeError,
    MergeSpaceSymbol,
    Parameter,
    RecipeError,
    Return,
    StateDict,
    StateDictKeyError,
    convert,
    merge,
    merge_method,
    model,
    skip_key,
    slerp,
    ties_sum,
    weighted_sum,
)  # fmt: skip
from mecha_exp.extensions import model_configs

T = TypeVar("T")
A = {"in.w": torch.tensor([1.0, 2.0]), "out.w": torch.tensor([3.0, 4.0]), "out.ids": torch.tensor([5, 6])}
B = {key: value + 10 for key, value in A.items()}


def config(identifier: str, *keys: str, shape: str = "[2]") -> None:
    """Register a model config with these keys."""
    listed = "".join(f"\n      {key}: {{shape: {shape}, dtype: float32}}" for key in keys)
    text = f"identifier: {identifier}\ncomponents:\n  part:\n    keys:{listed}\n"
    model_configs.register(model_configs.from_yaml(text))


@merge_method(register=False)
def noise_sum(
    a: Parameter(Tensor), alpha: Parameter(Tensor) = 0.5, seed: Parameter(int) = None, **kwargs
) -> Return(Tensor):
    generator = None if seed is None else torch.Generator().manual_seed(seed + len(kwargs["key"]))
    return (1 - alpha) * a + alpha * torch.randn(a.shape, generator=generator)


@merge_method(register=False)
def crossed(a: Parameter(StateDict[Tensor]), scale: Parameter(float) = 1.0, **kwargs) -> Return(Tensor):
    """What the other of `in` and `out` has."""
    other = {"in.w": "out.w", "out.w": "in.w"}.get(kwargs["key"], kwargs["key"])
    return a[other] * scale


def test_noise_is_the_same_with_a_seed_and_another_one_without():
    a = model(A)

    assert torch.equal(merge(noise_sum(a, seed=3))["in.w"], merge(noise_sum(a, seed=3))["in.w"])
    assert not torch.equal(merge(noise_sum(a))["in.w"], merge(noise_sum(a))["in.w"])
    assert torch.equal(merge(noise_sum(a, alpha=0.0))["in.w"], A["in.w"])


def test_a_method_asks_a_model_for_other_keys():
    merged = merge(crossed(model(A)))

    assert torch.equal(merged["in.w"], A["out.w"])
    assert torch.equal(merged["out.ids"], A["out.ids"])
    assert merged["out.ids"].dtype == torch.int64


def test_whole_numbers_that_a_method_makes_are_not_rounded():
    @merge_method(register=False)
    class same:
        def __call__(self, a: Parameter(StateDict[Tensor]), **kwargs) -> Return(Tensor):
            return a[kwargs["key"]]

    numbers = {
        "count": torch.tensor([2**24 + 1, -(2**53) - 1]),
        "mask": torch.tensor([[True, False]]),
        "palette": torch.tensor([255, 0], dtype=torch.uint8),
    }

    assert contents(merge(same(model(numbers)))) == contents(numbers)
    assert contents(merge(weighted_sum(same(model(numbers)), model(numbers)))) == contents(numbers)


def test_a_method_asks_a_merge_for_other_keys_and_is_merged_again():
    mean = weighted_sum(model(A), model(B), alpha=0.5)

    merged = merge(weighted_sum(crossed(crossed(mean), scale=2.0), model(A), alpha=0.5))

    assert torch.equal(merged["in.w"], (2 * (A["in.w"] + 5) + A["in.w"]) / 2)


def test_what_is_computed_lazily_has_the_bits_of_a_pass():
    torch.manual_seed(0)
    a, b, c = (
        model({"w": torch.randn(300, 300), "v": torch.randn(7), "s": torch.tensor(0.5)}) for _ in "abc"
    )

    @merge_method(register=False)
    def itself(a: Parameter(StateDict[Tensor]), **kwargs) -> Return(Tensor):
        return a[kwargs["key"]]

    for recipe in (slerp(a, b, alpha=0.3), ties_sum(a - c, b - c, k=0.3), (a - c).to(dtype="bfloat16")):
        lazily, streamed = merge(itself(recipe)), merge(recipe)
        assert all(torch.equal(lazily[key], streamed[key].to(lazily[key].dtype)) for key in streamed)


def test_a_state_dict_is_a_mapping_that_knows_its_keys():
    seen = {}

    @merge_method(register=False)
    def looks(a: Parameter(StateDict[Tensor]), **kwargs) -> Return(Tensor):
        seen.update(keys=list(a), length=len(a), config=a.model_config.identifier, has="nope" in a)
        try:
            a["nope"]
        except StateDictKeyError as error:
            seen["missing"] = error.args[0]
        return a[kwargs["key"]]

    merge(looks(weighted_sum(model(A), model(B))))

    assert seen == {
        "keys": list(A), "length": 3, "config": "structural", "has": False, "missing": "nope",
    }  # fmt: skip


def test_a_method_leaves_keys_out_and_a_fallback_takes_them():
    @merge_method(register=False)
    def without_in(a: Parameter(Tensor), **kwargs) -> Return(Tensor):
        return skip_key(kwargs["key"]) if kwargs["key"].startswith("in") else a * 2

    assert merge(without_in(model(A))).keys() == {"out.w", "out.ids"}
    assert torch.equal(merge(without_in(model(A)) | model(B))["in.w"], B["in.w"])


def test_a_method_that_skips_only_when_it_sees_the_values_is_an_error():
    @merge_method(register=False)
    def positive(a: Parameter(Tensor), **kwargs) -> Return(Tensor):
        return skip_key(kwargs["key"]) if float(a.sum()) > 0 else a

    with pytest.raises(MergeError, match=r"'positive' skipped the key 'in\.w' only when it saw the values"):
        merge(positive(model({"in.w": A["in.w"]})))


def test_a_failing_method_names_itself_the_key_the_shapes_and_the_line():
    @merge_method(register=False)
    def product(a: Parameter(Tensor), b: Parameter(Tensor), alpha: Parameter(Tensor) = 0.5) -> Return(Tensor):
        return a @ b.T @ alpha

    with pytest.raises(MergeError) as error:
        merge(product(model({"w": torch.ones(2, 3)}), model({"w": torch.ones(2, 3)})))

    said = str(error.value)
    assert said.startswith("the merge method 'product' failed on the key 'w': RuntimeError:")
    assert "given a: [2, 3] float32, b: [2, 3] float32, alpha: 0.5" in said
    assert "test_own_methods.py" in said
    assert "return a @ b.T @ alpha" in said


def test_a_cache_lives_from_merge_to_merge():
    @merge_method(register=False)
    def counted(a: Parameter(Tensor), **kwargs) -> Return(Tensor):
        cache = kwargs["cache"]
        cache[kwargs["key"]] = cache.get(kwargs["key"], 0) + 1
        return a + cache[kwargs["key"]]

    node = counted(model({"w": torch.zeros(1)}))
    cache = node.create_cache()

    results = [merge(weighted_sum(node, node, alpha=0.5), cache={node: cache})["w"].item() for _ in range(3)]

    assert results == [1, 2, 3]


@pytest.fixture
def fused():
    """A config with one key where another has three, and the way from here to there."""
    config("toy-split", "q", "k", "v")
    config("toy-fused", "qkv", shape="[6]")

    @merge_method(is_conversion=True)
    class split:
        calls = 0

        @staticmethod
        def map_keys(b):
            b["q", "k", "v"] = b.a.keys["qkv"]

        def __call__(self, a: Parameter(StateDict[Tensor], "toy-fused"), **kwargs) -> Return(
            Tensor, "toy-split"
        ):
            split.__wrapped__.calls += not a["qkv"].is_meta
            outputs, inputs = kwargs["key_relation"]
            return dict(zip(outputs, a[inputs["a"][0]].chunk(3), strict=True))

    return split


def test_a_class_makes_a_group_of_keys_at_once(fused):
    source = model({"qkv": torch.arange(6.0)}, "toy-fused")

    merged = merge(convert(weighted_sum(source, source), "toy-split"))

    assert {key: value.tolist() for key, value in merged.items()} == {"q": [0, 1], "k": [2, 3], "v": [4, 5]}
    assert fused.__wrapped__.calls == 1


def test_workers_that_want_keys_of_one_group_wait_for_it():
    made = []

    @merge_method(register=False)
    class together:
        @staticmethod
        def map_keys(b):
            b[tuple(b.keys())] = b.keys[tuple(b.keys())]

        def __call__(self, a: Parameter(StateDict[Tensor]), **kwargs) -> Return(Tensor):
            if not a["0"].is_meta:
                time.sleep(0.05)  # in which other workers come
                made.append(kwargs["key"])
            return {key: a[key] for key in kwargs["key_relation"].outputs}

    merge(together({f"{i}": torch.ones(3) for i in range(8)}), options=mecha_exp.EngineOptions(workers=4))

    assert len(made) == 1


@pytest.mark.parametrize(
    ("map_keys", "message"),
    [
        (
            lambda b: b.__setitem__("w", 5),
            r"5 says no keys that are needed\. Write b\.<argument>\.keys\[key\]",
        ),
        (lambda b: b.__setitem__(5, b.a.keys["w"]), "a key is a text, or several of them, and 5 is not"),
        (lambda b: b.__setitem__("w", b.a.keys[3]), "a key is a text, or several of them, and 3 is not"),
        (
            lambda b: b.__setitem__("w", b.a["w"]),
            r"write b\.<argument>\.keys\['w'\], not b\.<argument>\['w'\]",
        ),
        (lambda b: b.__setitem__("w", b.a.keys["w"] & 3), "3 says no keys that are needed"),
        (lambda b: b.__setitem__("w", b.a.keys["w"] | "w"), "'w' says no keys that are needed"),
        (lambda b: b.__setitem__("w", b.b.keys["w"]), "there is no argument 'b'"),
        (lambda b: 1 / 0, "map_keys failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_key_map_is_one_sentence(map_keys, message):
    @merge_method(register=False)
    class wrong:
        def __call__(self, a: Parameter(StateDict[Tensor]), **kwargs) -> Return(Tensor):
            return a["w"]

    wrong.__wrapped__.map_keys = staticmethod(map_keys)

    with pytest.raises(RecipeError, match=f"^wrong: .*{message}"):
        merge(wrong({"w": torch.ones(2)}))


def test_a_conversion_says_which_config_it_wanted(fused):
    config("toy-other", "w")

    with pytest.raises(RecipeError, match=r"split: a: expected 'toy-fused', got .* of 'toy-other'"):
        merge(fused(model({"w": torch.ones(2)}, "toy-other")))
    with pytest.raises(RecipeError, match="no conversions lead from 'toy-other' to 'toy-split'"):
        convert(model({"w": torch.ones(2)}, "toy-other"), "toy-split")


def test_a_conversion_takes_the_shortest_way(fused):
    config("toy-shout", "Q", "K", "V")

    @merge_method(is_conversion=True)
    class shout:
        @staticmethod
        def map_keys(b):
            for key in b.out.keys():
                b[key] = b.a.keys[key.lower()]

        def __call__(self, a: Parameter(StateDict[T], "toy-split"), **kwargs) -> Return(T, "toy-shout"):
            return a[kwargs["key"].lower()]

    node = convert(model({"qkv": torch.arange(6.0)}, "toy-fused"), "toy-shout")

    assert node.method is shout
    assert merge(node)["K"].tolist() == [2, 3]


def test_weights_of_blocks_become_those_of_keys():
    config("toy-full", "in.w", "out.w", "out.ids")
    config("toy-my_blocks", "IN", "OUT", shape="[]")

    @merge_method(is_conversion=True)
    def from_blocks(blocks: Parameter(StateDict[T], "toy-my_blocks"), **kwargs) -> Return(T, "toy-full"):
        return blocks["IN" if kwargs["key"].startswith("in") else "OUT"]

    a, b = model(A, "toy-full"), model(B, "toy-full")

    merged = merge(weighted_sum(a, b, alpha=convert({"IN": 0.1, "OUT": 0.5}, a)))
    partly = merge(weighted_sum(a, b, alpha=convert({"IN": 0.1}, a) | 0.25))

    assert torch.allclose(merged["in.w"], A["in.w"] + 1)
    assert torch.allclose(merged["out.w"], A["out.w"] + 5)
    assert torch.allclose(partly["out.w"], A["out.w"] + 2.5)
    with pytest.raises(RecipeError, match="no conversion starts from a model config with the keys INN"):
        convert({"INN": 0.1}, a)


UNET = "model.diffusion_model.input_blocks.4.1.norm.weight"
TEXT = "conditioner.embedders.1.model.ln_final.weight"


@pytest.fixture
def sdxl():
    """Two models with a key of SDXL's UNet and one of its text encoder, of zeros and of ones."""
    shapes = model_configs.resolve("sdxl-sgm").keys()
    return [
        model({key: torch.full(shapes[key].shape, value) for key in (UNET, TEXT)}, "sdxl-sgm")
        for value in (0.0, 1.0)
    ]


def test_a_config_of_two_blocks_of_sdxl(sdxl):
    config("sdxl-two_blocks", "text", "image", shape="[]")

    @merge_method(is_conversion=True)
    class convert_two_blocks:
        @staticmethod
        def map_keys(b):
            for key in b.out.keys():
                b[key] = b.blocks.keys["text" if key.startswith("conditioner.") else "image"]

        def __call__(self, blocks: Parameter(StateDict[T], "sdxl-two_blocks"), **kwargs) -> Return(
            T, "sdxl-sgm"
        ):
            (block,) = kwargs["key_relation"].inputs["blocks"]
            return blocks[block]

    a, b = sdxl

    merged = merge(weighted_sum(a, b, alpha=convert({"text": 0.25, "image": 0.75}, a)))

    assert (merged[UNET].unique().item(), merged[TEXT].unique().item()) == (0.75, 0.25)


def test_the_blocks_of_sdxl(sdxl):
    a, b = sdxl

    merged = merge(weighted_sum(a, b, alpha=convert({"IN04": 0.25, "default": 0.5}, a)))

    assert (merged[UNET].unique().item(), merged[TEXT].unique().item()) == (0.25, 0.5)


def test_a_text_encoder_of_one_model_and_a_unet_of_another(sdxl):
    a, b = sdxl

    parts = merge(mecha_exp.pick_component(a, "diffuser") | mecha_exp.pick_component(b, "clip_g"))

    assert (parts[UNET].unique().item(), parts[TEXT].unique().item()) == (0, 1)


def test_a_hyperparameter_may_be_computed_for_each_key():
    @merge_method(register=False)
    def by_key(values: Parameter(StateDict[float]), **kwargs) -> Return(float, "param"):
        return values[kwargs["key"].partition(".")[0]]

    @merge_method(register=False)
    def times(a: Parameter(Tensor), count: Parameter(int, gt=0)) -> Return(Tensor):
        return a * count

    assert torch.equal(merge(times(model(A), by_key({"in": 2, "out": 3})))["out.w"], A["out.w"] * 3)
    with pytest.raises(RecipeError, match=r"times: count: -1 is out of range"):
        merge(times(model(A), by_key({"in": 2, "out": -1})))


def test_an_interface_calls_the_method_for_the_config():
    config("toy-one", "x")
    config("toy-two", "y")

    @merge_method(is_interface=True)
    def shifted(a: Parameter(StateDict[Tensor])) -> Return(Tensor): ...

    for number, name, _key in ((1, "toy-one", "x"), (2, "toy-two", "y")):

        @merge_method(identifier=f"shifted_{number}", implements=shifted)
        def implementation(a: Parameter(StateDict[Tensor], name), **kwargs) -> Return(Tensor):
            return a[kwargs["key"]]

    assert merge(shifted(model({"y": torch.ones(2)}, "toy-two"))).keys() == {"y"}


def test_a_symbol_stands_for_one_merge_space():
    S = MergeSpaceSymbol("weight", "delta")

    @merge_method(register=False)
    def mean(a: Parameter(Tensor, S), b: Parameter(Tensor, S), mask: Parameter(Tensor, "param")) -> Return(
        Tensor, S
    ):
        return (a + b) / 2

    delta = model(A, "delta")
    assert mean(model(A), model(B), 0.5).merge_space == "weight"
    assert mean(delta, delta, 0.5).merge_space == "delta"
    with pytest.raises(RecipeError, match="must share one merge space"):
        mean(model(A), delta, 0.5)
    with pytest.raises(RecipeError, match="a symbol that no parameter names"):

        @merge_method(register=False)
        def nothing(a: Parameter(Tensor)) -> Return(Tensor, S):
            return a


def whole_dictionary(a: Parameter(Tensor)) -> Return(StateDict[Tensor]):
    """What a method does not return."""
    return {"a": a}


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda: merge_method(register=False)(whole_dictionary), "write Return(Tensor), not a StateDict"),
        (lambda: Return(Tensor, ("weight", "delta")), "is of one merge space, not of weight, delta"),
        (lambda: merge_method(register=False, is_conversion=True), "must be registered"),
        (lambda: merge_method(elementwise=True, register=False)(crossed.__wrapped__), "is not elementwise"),
        (lambda: merge_method(implements="slerp")(crossed.__wrapped__), "'slerp' is not an interface"),
        (
            lambda: merge_method(is_conversion=True)(crossed.__wrapped__),
            "says from and to which model config",
        ),
    ],
)
def test_a_declaration_without_a_meaning_is_refused(declare, said):
    with pytest.raises(RecipeError) as error:
        declare()

    assert said in str(error.value)


def test_parameters_that_mean_nothing_are_refused():
    with pytest.raises(RecipeError, match=r"'cache' is reserved for `\*\*kwargs`"):

        @merge_method(register=False)
        def cached(a: Parameter(Tensor), cache: Parameter(float)) -> Return(Tensor):
            return a

    with pytest.raises(RecipeError, match=r"has the default 0\.5, so it is a 'param'"):

        @merge_method(register=False)
        def defaulted(a: Parameter(Tensor, "weight") = 0.5) -> Return(Tensor):
            return a

    with pytest.raises(RecipeError, match=r"annotated with Parameter itself"):

        @merge_method(register=False)
        def bare(a: Parameter) -> Return(Tensor):
            return a
