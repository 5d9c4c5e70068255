"""What did not change between two models is no module of the file that is extracted from them."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from toy_lora import CONV, PROJ, Q, StateDict, base_model
from written import digest

import mecha_exp as m
from mecha_exp.architectures import detect, from_yaml, register, resolve

DIFFUSERS = "identifier: toy-diffusers_lora\nadapter: {base: toy-kohya, names: {'': [transformer.]}}"
MATRICES = 9
CHANGED = (Q, CONV)
NOTICE = "7 modules did not change and are left out"
FEW: dict[str, Callable[..., m.Node]] = {
    "kohya_lora": lambda difference: m.extract_kohya_lora(difference, rank=2),
    "lycoris_lora": lambda difference: m.extract_lycoris_lora(difference, rank=2),
    "diffusers_lora": lambda difference: m.extract_diffusers_lora(difference, rank=2),
    "kohya_lokr": m.extract_kohya_lokr,
    "lycoris_lokr": m.extract_lycoris_lokr,
}


@pytest.fixture(autouse=True)
def of_diffusers(toy: None) -> None:
    register(from_yaml(DIFFUSERS))


def tuned(*changed: str, seed: int = 2) -> StateDict:
    """The base with some tensors of another model."""
    other = base_model(seed)
    return base_model() | {key: other[key] for key in changed}


def read(tensors: StateDict) -> m.Node:
    return m.model(tensors, "toy-kohya")


def modules_in(made: Iterable[str]) -> set[str]:
    return {re.sub(r"\.(alpha|lora_.*|lokr_..)$", "", key) for key in made}


def with_zeros(fine: m.Node, base: m.Node) -> m.Node:
    """The same difference, and no plain one."""
    return m.scale(fine - base, alpha=1.0)


@pytest.mark.parametrize("name", FEW)
def test_a_module_that_did_not_change_is_left_out_and_the_merged_model_is_the_same(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    fine, base = read(tuned(*CHANGED, "unet.norm.weight")), read(base_model())

    m.merge(FEW[name](fine - base), tmp_path / "few.safetensors")

    assert NOTICE in caplog.text
    m.merge(FEW[name](with_zeros(fine, base)), tmp_path / "all.safetensors")
    few, every = (load_file(tmp_path / f"{file}.safetensors") for file in ("few", "all"))
    assert (len(modules_in(few)), len(modules_in(every))) == (len(CHANGED), MATRICES)
    assert all(torch.equal(tensor, every[key]) for key, tensor in few.items())
    assert detect(few).config.identifier.startswith("toy")
    from_few, from_all = (
        m.merge(base + m.lora_delta(m.model(str(tmp_path / f"{file}.safetensors")), base))
        for file in ("few", "all")
    )
    assert all(torch.equal(tensor, from_all[key]) for key, tensor in from_few.items())
    assert from_few.keys() == from_all.keys()


@pytest.mark.parametrize("name", FEW)
def test_two_models_without_a_change_are_an_error(name: str, save: Callable[..., m.Node]):
    fine, base = (m.model(save(file, base_model()), "toy-kohya") for file in ("fine", "base"))

    with pytest.raises(
        m.CheckpointError, match=r"fine.* and .*base.* are the same: the tensors of 9 modules"
    ):
        m.merge(FEW[name](fine - base))


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another dtype": torch.Tensor.bfloat16,
    "another zero": lambda tensor: tensor.where(tensor != 0, -0.0),
    "the last value": lambda tensor: tensor.index_fill(0, torch.tensor(5), 3.0),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_bytes_are_a_change_whether_the_values_differ_or_not(what: str):
    base = base_model() | {PROJ: torch.zeros(6, 4, 1, 1).half()}
    fine = base | {PROJ: OTHERS[what](base[PROJ])}

    made = m.merge(m.extract_kohya_lora(read(fine) - read(base), rank=2))

    assert modules_in(made) == {"lora_unet_proj"}


@pytest.mark.parametrize("elements", [1 << 13, (1 << 13) + 1, (1 << 20) + (1 << 13) + 1])
def test_a_change_of_the_last_element_is_found_in_tensors_of_any_length(elements: int):
    keys = f"{{one.weight: [1, {elements}], two.weight: [2, 1]}}"
    register(from_yaml(f"identifier: long-test\ncomponents: {{net: {{keys: {keys}}}}}"))
    register(from_yaml("identifier: long-lora\nadapter: {base: long-test, prefix: lora}"))
    base = {"one.weight": torch.zeros(1, elements).double(), "two.weight": torch.ones(2, 1).double()}
    last = base["one.weight"].clone()
    last[0, -1] = 1.0

    made = m.merge(m.extract_kohya_lora(m.model(base | {"one.weight": last}) - m.model(base), rank=1))

    assert modules_in(made) == {"lora_one"}


def test_what_is_not_the_difference_of_two_models_keeps_its_modules_of_zeros(
    caplog: pytest.LogCaptureFixture,
):
    fine, base = read(tuned(*CHANGED)), read(base_model())
    mean = m.weighted_sum(fine, base, alpha=0.5)
    stored = m.model({key: tensor for key, tensor in m.merge(fine - base).items() if key != "te.ids"})
    of_file = m.model(stored.source.state_dict, "toy-kohya", "delta")  # type: ignore[attr-defined]

    for difference in (mean - base, with_zeros(fine, base), (fine - base) + (fine - base), of_file):
        assert len(modules_in(m.merge(m.extract_kohya_lora(difference, rank=2)))) == MATRICES

    assert "did not change" not in caplog.text


def test_a_part_of_the_difference_leaves_out_what_did_not_change_in_it():
    fine, base = read(tuned(*CHANGED)), read(base_model())

    made = m.merge(m.extract_kohya_lora(m.pick_component(fine - base, "diffuser"), rank=2))

    assert modules_in(made) == {"lora_unet_conv_0"}


def test_a_merge_that_goes_on_with_an_extraction_has_its_zeros():
    fine, base = read(tuned(*CHANGED)), read(base_model())
    extraction = m.extract_kohya_lora(fine - base, rank=2)
    jobs: tuple[dict[str, torch.Tensor], ...] = ({}, {}, {})

    recipes = (extraction, m.convert(extraction, "toy-kohya"), extraction.to(dtype="float16"))
    m.merge_many([m.Job(recipe, made) for recipe, made in zip(recipes, jobs, strict=True)])

    file, deltas, cast = jobs
    assert len(modules_in(file)) == len(CHANGED)
    assert len(deltas) == MATRICES
    assert cast.keys() == file.keys()


def test_a_batch_leaves_out_of_each_file_what_did_not_change_in_its_own_model():
    base = read(base_model())
    one, other = (read(tuned(*changed)) for changed in ((Q,), CHANGED))
    made: tuple[dict[str, torch.Tensor], ...] = ({}, {})

    report = m.merge_many(
        [m.Job(m.extract_kohya_lora(fine - base, rank=2), made[i]) for i, fine in enumerate((one, other))]
    )

    assert modules_in(made[0]) == {"lora_te_layers_0_q"}
    assert modules_in(made[1]) == {"lora_te_layers_0_q", "lora_unet_conv_0"}
    assert {"8 modules did not change and are left out", NOTICE} <= set(report.warnings)


def test_a_merge_that_was_interrupted_goes_on_with_the_same_layout(tmp_path: Path):
    for name, tensors in {"fine": tuned(*CHANGED), "base": base_model()}.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    fine, base = (m.model(str(tmp_path / f"{name}.safetensors"), "toy-kohya") for name in ("fine", "base"))
    recipe, options = m.extract_kohya_lora(fine - base, rank=2), m.EngineOptions(workers=1)
    made: list[str] = []

    def interrupted(key: str, _: int) -> None:
        made.append(key)
        if len(made) == 4:
            raise KeyboardInterrupt

    m.merge_many([m.Job(recipe, tmp_path / "whole.safetensors")], options)
    with pytest.raises(KeyboardInterrupt):
        m.merge_many([m.Job(recipe, tmp_path / "whole again.safetensors")], options, interrupted)
    report = m.merge_many([m.Job(recipe, tmp_path / "whole again.safetensors")], options)

    assert 0 < report.resumed_keys < report.keys == 6
    files = [tmp_path / name for name in ("whole.safetensors", "whole again.safetensors")]
    assert digest(files[1]) == digest(files[0])


def test_a_method_says_by_its_key_map_what_it_leaves_out():
    with pytest.raises(m.RecipeError, match=r"`skip_unchanged=True` leaves out keys .* `map_keys` says"):

        @m.merge_method(register=False, skip_unchanged=True)
        def plain(a: m.Parameter(torch.Tensor, "delta")) -> m.Return(torch.Tensor):  # type: ignore[valid-type]
            return a


@pytest.mark.parametrize(
    ("identifier", "version"), [("sd1-kohya", "sd_v1"), ("sdxl-kohya", "sdxl_base_v1-0")]
)
def test_a_file_of_one_module_says_what_it_is_for_though_other_models_have_one_of_that_name(
    identifier: str, version: str, tmp_path: Path
):
    shapes = {key: info.shape for key, info in resolve(identifier).keys().items() if key.startswith("unet.")}
    one, other = [key for key, shape in shapes.items() if len(shape) > 1][:2]
    base = {key: torch.zeros(shapes[key]) for key in (one, other)}
    fine = base | {one: torch.ones(shapes[one])}

    m.merge(
        m.extract_kohya_lora(m.model(fine, identifier) - m.model(base, identifier), rank=1),
        tmp_path / "one.safetensors",
    )

    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        assert len(modules_in(file.keys())) == 1
        assert file.metadata()["ss_base_model_version"] == version
