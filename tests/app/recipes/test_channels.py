"""Image models with other numbers of input channels: inpainting, pix2pix, Flux Fill."""

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mecha_exp import CheckpointError, EngineOptions, add_difference, linear, merge, ties, weighted_sum

FIRST = "model.diffusion_model.input_blocks.0.0.weight"
EMA = "model_ema.diffusion_modelinput_blocks00weight"
OTHER = "model.diffusion_model.input_blocks.0.0.bias"
OPTIONS = EngineOptions(on_channels="base")


def unet(seed: int, channels: int, key: str = FIRST, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {key: (8, channels, 3, 3), OTHER: (8,)}
    return {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in shapes.items()}


def of_webui(theta: Callable[..., Tensor], a: Tensor, *others: Tensor) -> Tensor:
    """What AUTOMATIC1111's extras do: the first four channels of A are merged, A keeps the rest."""
    result = a.clone()
    result[:, :4] = theta(a[:, :4], *others)
    return result


@pytest.mark.parametrize("channels", [9, 8])
@pytest.mark.parametrize("key", [FIRST, EMA, "conv_in.weight", "unet.conv_in.weight"])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float32, torch.float16, torch.float32)])
def test_add_difference_changes_the_channels_that_all_have(channels, key, dtypes):
    a, b, c = (unet(i, n, key, d) for i, n, d in zip(range(3), (channels, 4, 4), dtypes, strict=True))

    merged = merge(add_difference(a, b, c, alpha=0.8), options=OPTIONS)

    expected = of_webui(lambda x, y, z: x + 0.8 * (y.float() - z.float()), a[key], b[key], c[key])
    assert torch.allclose(merged[key], expected, atol=1e-6)
    assert torch.equal(merged[key][:, 4:], a[key][:, 4:])
    assert torch.allclose(merged[OTHER], a[OTHER] + 0.8 * (b[OTHER].float() - c[OTHER].float()), atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_weighted_sums_keep_the_channels_of_the_first_model(alpha):
    a, b = unet(0, 9), unet(1, 4)

    merged = merge(weighted_sum(a, b, alpha=alpha), options=OPTIONS)

    expected = of_webui(lambda x, y: (1 - alpha) * x + alpha * y, a[FIRST], b[FIRST])
    assert torch.allclose(merged[FIRST], expected, atol=1e-6)
    assert torch.equal(merged[FIRST][:, 4:], a[FIRST][:, 4:])


def test_the_result_has_the_channels_of_the_first_input():
    a, b = unet(0, 4), unet(1, 9)

    merged = merge(weighted_sum(a, b, alpha=0.5), options=OPTIONS)

    assert torch.allclose(merged[FIRST], (a[FIRST] + b[FIRST][:, :4]) / 2)


@pytest.mark.parametrize("method", [linear, ties])
def test_several_inputs_are_as_if_they_had_the_channels_of_the_first(method):
    inpainting, *others = unet(0, 9), unet(1, 4), unet(2, 4), unet(3, 8)

    merged = merge(method(inpainting, *others), options=OPTIONS)

    padded = [
        {**other, FIRST: torch.cat([other[FIRST], inpainting[FIRST][:, other[FIRST].shape[1] :]], dim=1)}
        for other in others
    ]
    assert torch.equal(merged[FIRST], merge(method(inpainting, *padded))[FIRST])


@pytest.mark.parametrize("key", ["img_in.weight", "x_embedder.weight"])
def test_the_first_matrix_of_flux_is_a_first_layer_too(key):
    fill, b, c = ({key: torch.randn(6, n)} for n in (12, 4, 4))
    merged = merge(add_difference(fill, b, c, alpha=1.0), options=OPTIONS)[key]
    assert torch.equal(merged[:, 4:], fill[key][:, 4:])
    assert torch.allclose(merged[:, :4], fill[key][:, :4] + b[key] - c[key], atol=1e-6)


def test_without_the_option_the_error_names_it():
    with pytest.raises(CheckpointError) as error:
        merge(weighted_sum(unet(0, 9), unet(1, 4), alpha=0.5))

    said = str(error.value)
    assert "on_channels=base merges the channels that both have" in said
    assert "one architecture" not in said


@pytest.mark.parametrize(
    ("key", "shapes"),
    [
        ("model.diffusion_model.input_blocks.1.0.weight", [(8, 9, 3, 3), (8, 4, 3, 3)]),
        ("first_stage_model.encoder.conv_in.weight", [(8, 3, 3, 3), (8, 4, 3, 3)]),
        ("decoder.conv_in.weight", [(8, 16, 3, 3), (8, 4, 3, 3)]),
        (FIRST, [(16, 9, 3, 3), (8, 4, 3, 3)]),
        (FIRST, [(8, 9, 3, 3), (8, 4, 1, 1)]),
        (FIRST, [(8,), (9,)]),
    ],
)
def test_all_other_shapes_are_refused_as_ever(key, shapes):
    models = [{key: torch.zeros(shape)} for shape in shapes]
    with pytest.raises(CheckpointError, match="Only models of one architecture can be merged") as error:
        merge(weighted_sum(*models, alpha=0.5), options=OPTIONS)
    assert "on_channels" not in str(error.value)


def test_both_kinds_of_unlike_shapes_are_told_apart_in_one_error():
    a, b = ({**unet(i, n), "x.weight": torch.zeros(n, n)} for i, n in enumerate((9, 4)))

    with pytest.raises(CheckpointError) as error:
        merge(weighted_sum(a, b, alpha=0.5))

    assert all(word in str(error.value) for word in ("on_channels=base", "Only models of one architecture"))


def test_an_inpainting_model_is_made_on_the_command_line(app, folder):
    models = {"inpainting": unet(0, 9), "style": unet(1, 4), "sd15": unet(2, 4)}
    for name, tensors in models.items():
        save_file(tensors, f"{name}.safetensors")
    words = ["recipe=add_difference", "evaluator=none", "output.path=out.safetensors"]
    words += ["models.base=sd15.safetensors", "models.experts=[inpainting.safetensors,style.safetensors]"]

    assert "engine.on_channels=base" in app(*words).err
    outcome = app(*words, "engine.on_channels=base")

    assert outcome.status == 0, outcome.err
    assert "has 4 input channels, and 9 in" in outcome.err
    a, b, c = (tensors[FIRST] for tensors in models.values())
    merged = load_file("out.safetensors")[FIRST]
    assert torch.allclose(merged, of_webui(lambda x, y, z: x + y - z, a, b, c), atol=1e-6)
