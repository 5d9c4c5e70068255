"""Model configs, blocks and conversions are those of sd-mecha 1.1.8: key by key and shape by shape.

`make parity` writes tests/golden/model_configs.json anew, from sd-mecha in an environment of its own.
"""

import json
from collections.abc import Collection
from pathlib import Path

import pytest

from mecha_exp.architectures import resolve, views
from mecha_exp.architectures.lora import ALPHA, LOKR, LORA
from parity.configs import CONVERSIONS, digest

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "tests" / "golden" / "model_configs.json").read_text(encoding="utf-8")
)
POSITIONS = ".text_model.embeddings.position_ids"
MORE = {
    "sd1-kohya": {f"te{POSITIONS}"},
    "sdxl-kohya": {f"te2{POSITIONS}"},
    "sdxl-kohya_but_diffusers": {f"te2{POSITIONS}"},
    "sd3-comfyui": {f"text_encoders.{name}.transformer{POSITIONS}" for name in ("clip_l", "clip_g")},
    "flux-flux": {f"text_encoders.clip_l.transformer{POSITIONS}"},
}
"""What some files have and sd-mecha's configs do not know; all of it optional."""
FORGOTTEN = {"sd1-kohya -> sd1-ldm": ("mid.attn_1.norm.weight", "mid.attn_1.norm.bias", POSITIONS)}
"""What sd-mecha does not convert, though both configs have it: the norms of the VAE's attention."""


@pytest.mark.parametrize("identifier", sorted(GOLDEN["configs"].keys() - {"singleton-mecha"}))
def test_a_config_has_the_keys_and_shapes_of_sd_mechas(identifier):
    keys = resolve(identifier).keys()
    more = MORE.get(identifier, set())

    assert all(keys[key].optional for key in more)
    rows = [f"{key} {list(info.shape)}" for key, info in keys.items() if key not in more]
    assert digest(rows) == GOLDEN["configs"][identifier]


@pytest.mark.parametrize("identifier", GOLDEN["adapters"])
def test_the_config_of_lora_files_has_the_names_of_sd_mechas(identifier):
    ends = tuple(f".{suffix}" for suffix in (*LORA, *LOKR, ALPHA))

    names = [key for key in resolve(identifier).keys() if key.endswith(ends)]

    assert digest(names) == GOLDEN["adapters"][identifier]


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_makes_every_key_of_what_sd_mecha_makes_it_of(name):
    source, target = name.split(" -> ")

    forgotten = FORGOTTEN.get(name, ())
    made = {key: view for key, view in views(source, target).by_key.items() if not key.endswith(forgotten)}
    rows = [f"{key}: {' '.join(_as_sd_mecha(key, view.sources, source))}" for key, view in made.items()]

    assert digest(rows) == GOLDEN["conversions"][name]


def _as_sd_mecha(key: str, sources: Collection[str], config: str) -> Collection[str]:
    """The weights that a key is made of there: EMA weights have that of BASE, and not of their block."""
    is_ema = key.startswith("model_ema.diffusion_model") and config == "sd1-supermerger_blocks"
    return ["BASE"] if is_ema else sources
