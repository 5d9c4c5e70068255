"""What headers and configurations of inputs tell, and no result shows: warnings before a merge."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import mecha_exp as m
from mecha_exp import Job, plan
from mecha_exp.checkpoint.dtypes import FORMATS
from mecha_exp.checkpoint.safetensors.header import INDEX
from mecha_exp.engine import merge_many

FLOATS = [entry.torch for entry in FORMATS.values() if entry.arithmetic and entry.torch]
SHAPE = (4, 6)
ROUNDED, STORED = "is merged as if it had been trained", "An output dtype of"


def write(folder: Path, name: str, **tensors: torch.Tensor) -> str:
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / f"{name}.safetensors")
    return str(folder / f"{name}.safetensors")


def weights(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def warnings(recipe: m.Node, **options: object) -> list[str]:
    """What the plan of a merge warns of."""
    with plan([Job(recipe, {})], m.EngineOptions(**options)) as made:
        return list(map(str, made.warnings))


@pytest.mark.parametrize("own, other", [*itertools.product(FLOATS, FLOATS)], ids=str)
def test_a_coarser_dtype_beside_a_finer_one_is_said(own: torch.dtype, other: torch.dtype, tmp_path: Path):
    base, expert = write(tmp_path, "base", w=weights(own)), write(tmp_path, "expert", w=weights(other, 1))
    said = warnings(m.weighted_sum(base, expert, alpha=0.5))

    coarse, fine = sorted((own, other), key=lambda dtype: -torch.finfo(dtype).eps)
    differ = torch.finfo(coarse).eps > max(torch.finfo(fine).eps, torch.finfo(torch.float32).eps)
    about_inputs = [text for text in said if ROUNDED in text]
    about_output = [text for text in said if STORED in text]
    assert len(about_inputs) == differ and len(about_output) == (differ and own is coarse)
    if differ:
        names = (base, expert) if own is coarse else (expert, base)
        assert about_inputs[0].startswith(f"{names[0]} has 1 key in {str(coarse)[6:]} that {names[1]} has in")


def test_of_what_is_chosen_or_lies_elsewhere_nothing_is_said(tmp_path: Path):
    fine, coarse = weights(torch.float32), weights(torch.bfloat16, 1)
    a, b = write(tmp_path, "a", w=coarse, of_a=coarse), write(tmp_path, "b", w=coarse)
    c = write(tmp_path, "c", w=fine)
    delta = m.model(write(tmp_path, "delta", w=coarse), merge_space="delta")

    skip = m.EngineOptions(on_missing="skip")
    cast = m.weighted_sum(a, c, alpha=0.5).to(dtype="bf16")
    with plan([Job(cast, {}), Job(m.weighted_sum(a, c, alpha=0.5), {}, torch.float16)], skip) as made:
        (said,) = [text for text in made.warnings if ROUNDED in text or STORED in text]
    assert ROUNDED in said and "a.safetensors has 1 key in bfloat16" in said
    assert not warnings(m.add_difference(c, delta, alpha=1.0)) and not warnings(
        m.weighted_sum(b, b, alpha=0.5)
    )


def folder(path: Path, **config: object) -> str:
    path.mkdir()
    save_file({"w": torch.ones(SHAPE)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    "entry, own, other",
    [
        ("model_type", "llama", "mistral"),
        ("max_position_embeddings", 2048, 8192),
        ("bos_token_id", 1, 2),
        ("eos_token_id", 2, [2, 7]),
        ("pad_token_id", 0, 3),
    ],
)
def test_configurations_that_differ_in_what_decides_are_said(entry, own, other, tmp_path: Path):
    a, b = folder(tmp_path / "a", **{entry: own}), folder(tmp_path / "b", **{entry: other})

    (said,) = warnings(m.weighted_sum(a, b, alpha=0.5))
    assert f"{entry} is {own} in {a} and {other} in {b}" in said.replace("'", "")
    assert not warnings(m.weighted_sum(a, folder(tmp_path / "c", **{entry: own}), alpha=0.5))


def test_the_base_among_the_experts_is_said(tmp_path: Path):
    base, expert = (write(tmp_path, name, w=weights(torch.float32, len(name))) for name in ("base", "expert"))

    (said,) = warnings(m.ties(base, expert, base))
    assert said.startswith(f"ties: base and models: one model is given 2 times, and counts as often: {base}")


def test_keys_that_are_taken_from_one_input_alone_are_said(tmp_path: Path):
    w = weights(torch.float32)
    base, changed = write(tmp_path, "base", w=w, v=w), write(tmp_path, "changed", w=w, v=w + 1)
    without = write(tmp_path, "without", w=w)

    (said,) = warnings(m.task_arithmetic(base, changed, without), on_missing="base")
    assert said.startswith(
        "1 key is not in every input and is taken from the first input that has such a key"
    )
    assert said.endswith("without what other inputs changed: v")


@pytest.mark.parametrize("beside", ["ema", "optimizer_of_one_tensor"])
def test_a_state_dict_beside_the_one_that_is_read_is_said(beside: str, tmp_path: Path):
    w = weights(torch.float32)
    torch.save({"model": {"w": w}, beside: {"w": w + 1}, "step": 3}, tmp_path / "x.pt")
    other = write(tmp_path, "other", w=w)

    (said,) = warnings(m.weighted_sum(str(tmp_path / "x.pt"), other, alpha=0.5))
    assert f"x.pt: 'model' is read, and not {beside}, which it holds too" in said


def test_what_is_no_tensor_is_said(tmp_path: Path):
    w = weights(torch.float32)
    torch.save({"w": w, "version": 3}, tmp_path / "x.pt")

    (said,) = warnings(m.weighted_sum(str(tmp_path / "x.pt"), write(tmp_path, "other", w=w), alpha=0.5))
    assert said.endswith("x.pt: left out, since they are not tensors: version")


def test_shards_and_keys_that_an_index_leaves_out_are_said(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    save_file({"w": torch.ones(SHAPE)}, model / names[0])
    save_file({"v": torch.ones(SHAPE), "more": torch.ones(1)}, model / names[1])
    save_file({"u": torch.ones(SHAPE)}, model / names[2])
    save_file({"u": torch.ones(SHAPE)}, model / "model-00002-of-00002.safetensors")  # of an earlier upload
    index = {"weight_map": {"w": names[0], "v": names[1]}}
    (model / f"model.safetensors{INDEX}").write_text(json.dumps(index))
    other = write(tmp_path, "other", w=torch.zeros(SHAPE), v=torch.zeros(SHAPE))

    unread, left_out = sorted(warnings(m.weighted_sum(str(model), other, alpha=0.5)), key=len)
    assert unread.endswith(f"{names[2]} is not read: model.safetensors{INDEX} does not name it")
    assert left_out.endswith(f"{names[1]}: left out, not being in model.safetensors{INDEX}: more")


@pytest.mark.parametrize("stored, output", [*itertools.product(FLOATS, FLOATS)], ids=str)
def test_keys_that_are_too_small_for_the_output_are_said(stored, output, tmp_path: Path):
    """Of keys that are streamed and that are computed together, wherever their largest value is."""
    generator = torch.Generator().manual_seed(0)
    exponents = [*range(-30, 4), *[-4] * 70]
    sizes = [*[400_000] * 20, *[20] * (len(exponents) - 20)]
    model = {}
    for number, (exponent, size) in enumerate(zip(exponents, sizes, strict=True)):
        model[f"key.{number}"] = torch.rand(size, generator=generator) * 2.0**exponent / 2
        model[f"key.{number}"][-1] = 2.0**exponent
    model |= {"zero": torch.zeros(400_000), "large at its end": torch.full((400_000,), 1e-9)}
    model["large at its end"][-1] = 1
    model = {key: values.to(stored) for key, values in model.items()}
    write(tmp_path, "model", **model)

    least = torch.finfo(output).tiny if torch.finfo(stored).tiny < torch.finfo(output).tiny else 0
    peaks = [float(values.double().abs().max()) for values in model.values()]
    small = sum(0 < peak < least for peak in peaks)
    recipe = m.passthrough(str(tmp_path / "model.safetensors"), scale=1.0)
    report = merge_many([Job(recipe, tmp_path / "out.safetensors", output)], m.EngineOptions(workers=2))
    said = [text for text in report.warnings if "fewer digits" in text]
    assert [int(text.split()[0]) for text in said] == ([small] if small else [])
