"""`evaluator=images`: the pictures are those of diffusers on the saved pipeline, with their scores."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import simulated_gpu
import torch
from counted_transfers import Counting
from drawn import PROMPTS, by_the_library, context_of, measured, pixels
from safetensors.torch import load_file
from state_dicts import numbers_of

from mecha_exp import Context, EvaluationError

pytest.importorskip("diffusers")

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours


@pytest.fixture
def folder(pipelines: Path) -> Path:
    return pipelines


def test_pictures_are_those_of_the_saved_pipeline_and_distances_follow(folder, beside):
    measurement = measured(folder)
    again = measured(folder, numbers_of(folder / "a"))

    expected, of_a, of_b = (by_the_library(folder / name) for name in ("merged", "a", "b"))
    for (prompt, seed), picture in expected.items():
        number = PROMPTS.index(prompt) + 1
        name = f"{number:02} {prompt.removesuffix('.')} seed {seed}"
        np.testing.assert_array_equal(pixels(measurement.files[f"{name}.png"]), picture)
        np.testing.assert_array_equal(pixels(again.files[f"{name}.png"]), of_a[prompt, seed])
    assert len(measurement.files) == 4
    for name, pictures in (("a", of_a), ("b", of_b)):
        apart = [np.sqrt(((expected[shot].astype(float) - pictures[shot]) ** 2).mean()) for shot in expected]
        beside("images", f"distance/{name}", measurement.metrics[f"distance/{name}"], np.mean(apart))
        assert np.mean(apart) > 0
    to_both = measurement.metrics["distance/a"] + measurement.metrics["distance/b"]
    assert measurement.metrics["score"] == pytest.approx(-to_both / 2)
    assert again.metrics["distance/a"] == 0
    assert again.metrics["score"] == pytest.approx(-again.metrics["distance/b"] / 2)
    assert measurement.outcomes is None  # distances are not quality, and nothing is concluded from them
    by_picture = measurement.further["distance"]
    assert by_picture.clusters["pictures"].tolist() == [p for p in PROMPTS for _ in range(2)]
    assert by_picture.values["pictures"].mean() == pytest.approx(to_both / 2)


def test_schedulers_are_those_of_diffusers(folder):
    measurement = measured(
        folder, schedulers=["EulerDiscreteScheduler"], distances=False, clip=str(folder / "clip")
    )

    expected = by_the_library(folder / "merged", "EulerDiscreteScheduler")
    picture = pixels(measurement.files["01 a photo of a cat seed 3 EulerDiscrete.png"])
    np.testing.assert_array_equal(picture, expected[PROMPTS[0], 3])


def test_one_component_is_merged_into_the_rest_of_a_pipeline(folder):
    unet = load_file(folder / "merged/unet/diffusion_pytorch_model.safetensors")

    of_unet = measured(
        folder,
        unet,
        component="unet",
        model=str(folder / "merged"),
        distances=False,
        clip=str(folder / "clip"),
    )

    whole = measured(folder, distances=False, clip=str(folder / "clip"))
    assert of_unet.files == whole.files


def test_one_component_is_measured_after_whole_pipelines(folder):
    unet = load_file(folder / "merged/unet/diffusion_pytorch_model.safetensors")
    settings = {"model": str(folder / "merged"), "distances": False, "clip": str(folder / "clip")}

    whole = measured(folder, **settings)
    of_unet = measured(folder, unet, component="unet", **settings)

    assert of_unet.files == whole.files


def test_weights_under_older_names_are_loaded_by_the_library(folder):
    """The attention of VAEs from before diffusers 0.15 has other names."""
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = {}
    for key, tensor in numbers_of(folder / "merged").items():
        for new, name in old.items():
            if key.startswith("vae.") and ".attentions." in key:
                key = key.replace(f".{new}.", f".{name}.")
        renamed[key] = tensor
    assert any(".query." in key for key in renamed)

    assert (
        measured(folder, renamed, distances=False, clip=str(folder / "clip")).files == measured(folder).files
    )


def test_the_pictures_of_an_input_are_drawn_once(folder, monkeypatch):
    from mecha_exp.evaluators.pictures import drawing

    drawn: list[str] = []
    draw = drawing.Drawing._one
    monkeypatch.setattr(
        drawing.Drawing, "_one", lambda self, made, shot: drawn.append(shot.name) or draw(self, made, shot)
    )
    drawing._of_input.cache_clear()
    a, b = (numbers_of(folder / name) for name in "ab")

    first = measured(folder, a)
    assert len(drawn) == 2 * len(first.files)
    second = measured(folder, b, Context("b", inputs={name: folder / name for name in "ba"}))
    assert len(drawn) == 2 * len(first.files)
    between = measured(folder, {key: torch.lerp(a[key], b[key], 1e-3) for key in a})
    assert len(drawn) == 3 * len(first.files)

    assert first.metrics["distance/a"] == second.metrics["distance/b"] == 0
    assert first.metrics["distance/b"] == second.metrics["distance/a"] > between.metrics["distance/a"] > 0


class Stopped(Exception):
    """Stands for Ctrl-C."""


def test_the_same_command_goes_on_at_the_picture_where_it_stopped(folder, tmp_path, monkeypatch):
    from mecha_exp.evaluators.pictures import drawing

    whole = measured(folder)
    drawn: list[str] = []
    draw = drawing.Drawing._one

    def counted(self, made, shot):
        if len(drawn) == stop:
            raise Stopped
        drawn.append(shot.name)
        return draw(self, made, shot)

    monkeypatch.setattr(drawing.Drawing, "_one", counted)
    drawing._of_input.cache_clear()
    context = replace(context_of(folder), kept=tmp_path / ".evaluation.partial")
    names = [name.removesuffix(".png") for name in whole.files]
    for limit in (3, 6):  # in the middle of the point's pictures, and of those of an input
        stop = limit
        with pytest.raises(EvaluationError, match="Stopped"):
            measured(folder, context=context)
        context = replace(context)
    stop = 100
    again = measured(folder, context=context)

    assert drawn == [*names, *names, *names]
    assert again.files == whole.files
    assert again.metrics == whole.metrics


def test_a_kept_picture_that_is_damaged_is_drawn_again(folder, tmp_path):
    context = replace(context_of(folder), kept=tmp_path / ".evaluation.partial")
    whole = measured(folder, context=context, distances=False, clip=str(folder / "clip"))
    first, second, *_ = sorted(tmp_path.glob("*.png"))
    first.write_bytes(second.read_bytes())
    second.unlink()

    again = measured(folder, context=replace(context), distances=False, clip=str(folder / "clip"))

    assert again.files == whole.files


def test_pixels_that_are_not_numbers_are_an_error_of_that_point(folder):
    broken = numbers_of(folder / "merged")
    broken["unet.conv_out.bias"] = torch.full_like(broken["unet.conv_out.bias"], torch.nan)

    with pytest.raises(
        EvaluationError, match="the picture '01 a photo of a cat seed 0' has pixels that are not"
    ):
        measured(folder, broken)


def test_a_pipeline_holds_no_weights_of_a_point_afterwards(folder):
    from mecha_exp.evaluators.common import ModelFolder
    from mecha_exp.evaluators.pictures.pipelines import pipeline

    for _ in range(2):
        with pipeline(ModelFolder(folder / "a"), numbers_of(folder / "merged"), None, "cpu", "auto") as made:
            networks = [made.unet, made.vae, made.text_encoder]
            assert {t.device.type for network in networks for t in network.state_dict().values()} == {"cpu"}

    assert made.text_encoder is None
    assert {t.device.type for n in (made.unet, made.vae) for t in n.state_dict().values()} == {"meta"}


def test_a_gpu_gets_the_networks_of_the_next_point_beforehand(folder, monkeypatch):
    from mecha_exp.evaluation.transfers import expect
    from mecha_exp.evaluators.common import ModelFolder
    from mecha_exp.evaluators.pictures.pipelines import _pipeline, pipeline

    gpu = torch.device(simulated_gpu.NAME)
    transfers = Counting(gpu)
    monkeypatch.setattr("mecha_exp.evaluation.transfers._transfers", {gpu: transfers})
    first = numbers_of(folder / "merged")
    points = [first, {key: tensor * 2 for key, tensor in first.items()}]
    of_texts = [key for key in first if key.startswith("text_encoder.")]
    with simulated_gpu.own_stream(simulated_gpu.NAME):
        for number, point in enumerate(points):
            copied = transfers.copies
            with pipeline(ModelFolder(folder / "a"), point, None, simulated_gpu.NAME, "auto") as made:
                assert transfers.copies - copied == len(of_texts if number else point)
                for part in ("unet", "vae"):
                    for name, tensor in getattr(made, part).state_dict().items():
                        assert torch.equal(tensor.cpu(), point[f"{part}.{name}"])
                if not number:
                    expect(points[1])
    _pipeline.cache_clear()  # it keeps tensors of that device, which other tests do not have
