"""Every kind of document that mecha_exp reads: a valid one, and how commands read it."""

import contextlib
import functools
import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

MODEL = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.o_proj.weight": (4, 4),
    "model.norm.weight": (4,),
    "lm_head.weight": (8, 4),
}
WORDS = ["<s>", "</s>", "a", "b", "c", "ab", "bc", "abc"]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "rope_scaling": None,
    "layer_types": ["full_attention"],
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": 0, "content": "<s>", "special": True},
        {"id": 1, "content": "</s>", "special": True},
    ],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "BPE", "vocab": {w: n for n, w in enumerate(WORDS)}, "merges": ["a b", ["b", "c"]]},
}
TOKENIZER_CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "additional_special_tokens": ["abc"],
    "added_tokens_decoder": {"0": {"content": "<s>"}},
    "chat_template": [{"name": "default", "template": "{{ x }}"}],
}
PEFT = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 4.5},
    "target_modules": ["q_proj"],
    "use_rslora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "base_model_name_or_path": "base",
    "trainable_token_indices": None,
    "init_lora_weights": True,
}
Q = "model.layers.0.self_attn.q_proj"


@dataclass(frozen=True)
class Kind:
    """A kind of document.

    Attributes:
        name: of the kind.
        file: where it lies below the current folder.
        content: a valid one: data, or bytes.
        read: reads it as commands do.
        weight: how often it is drawn.
        is_yaml: whether it is YAML, and not JSON.
    """

    name: str
    file: str
    content: Any
    read: Callable[[], object]
    weight: float = 1
    is_yaml: bool = False
    write: Callable[[bytes], None] | None = None

    def put(self, raw: bytes) -> None:
        """Write it."""
        if self.write is not None:
            self.write(raw)
            return
        path = Path(self.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)


def command(*words: str) -> int:
    """Run the command line in this process; a traceback is an error."""
    from mecha_exp.cli import main

    before = sys.argv
    sys.argv = ["mecha_exp", *words]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.argv = before
    err.flush()
    said = err.buffer.getvalue()  # type: ignore[attr-defined]
    if b"Traceback (most recent" in said:
        raise AssertionError(said.decode("utf-8", "replace")[-1500:])
    out.flush()
    said += out.buffer.getvalue()  # type: ignore[attr-defined]
    if status and not said.strip():
        raise AssertionError(f"status {status}, and no word of why")
    if status and b"error:" in err.buffer.getvalue():  # type: ignore[attr-defined]
        from mecha_exp.errors import MechaError

        raise MechaError(said.decode("utf-8", "replace"))
    return status


def tensors(seed: int, shapes: dict[str, tuple[int, ...]] = MODEL) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def write_models(folder: Path) -> None:
    """The models and adapters that documents lie beside."""
    for number, name in enumerate(("base", "a", "b")):
        path = folder / name
        path.mkdir(parents=True)
        save_file(tensors(number), path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(
            json.dumps({k: v for k, v in CONFIG.items() if k != "quantization_config"})
        )
        (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        (path / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
        save_file({"w": torch.full((4,), float(number))}, folder / f"{name}.safetensors")
    for name in ("lora", "lora2"):
        (folder / name).mkdir()
        factors = {
            f"base_model.model.{Q}.lora_A.weight": (2, 4),
            f"base_model.model.{Q}.lora_B.weight": (4, 2),
        }
        save_file(tensors(5, factors), folder / name / "adapter_model.safetensors")
        (folder / name / "adapter_config.json").write_text(json.dumps(PEFT))


def _with_header(
    path: str, values: dict[str, torch.Tensor], entry: str, more: dict[str, str]
) -> Callable[[bytes], None]:
    def write(raw: bytes) -> None:
        text = raw.decode("utf-8", "ignore")
        save_file(values, path, {"format": "pt", **more, entry: text})

    return write


def _opened(path: str) -> Any:
    from mecha_exp.checkpoint.folder import open_stored

    return open_stored(Path(path))


def _merge(path: str) -> int:
    shutil.rmtree("out", ignore_errors=True)
    Path("out.safetensors").unlink(missing_ok=True)
    return command("merge", path, "-o", "out.safetensors")


def _open_model(path: str) -> None:
    with _opened(path) as model:
        for key in model.keys():
            model.read(key)


def _tokenizer() -> None:
    from mecha_exp.errors import CheckpointError
    from mecha_exp.recipe.token_names import TokenNames
    from mecha_exp.sources.tokenizer import Tokenizer, generation_settings, tokenizer_files

    own, other = Tokenizer.beside(Path("a")), Tokenizer.beside(Path("base"))
    tokenizer_files(Path("b"), Path("a"))
    generation_settings(Path("a"), Path("base"))
    if own and other:
        list(own.differences(other))
        with contextlib.suppress(CheckpointError):
            own.in_order()
        names = TokenNames(own), TokenNames(other)
        for token in names[1].rows:
            names[0].row_of(token, names[1])


def _mergekit_templates() -> None:
    from mecha_exp.mergekit import from_mergekit

    Path("mk.yml").write_text(
        yaml.safe_dump(
            {
                **{k: v for k, v in MERGEKIT.items() if k != "tokenizer_source"},
                "tokenizer": {"source": "union"},
                "chat_template": "auto",
            }
        )
    )
    from_mergekit("mk.yml")
    shutil.rmtree("out", ignore_errors=True)
    command("merge", "mk.yml", "out")


MERGEKIT: dict[str, Any] = {
    "merge_method": "ties",
    "base_model": "base",
    "models": [
        {
            "model": "a",
            "parameters": {
                "weight": [{"filter": "q_proj", "value": 0.5}, {"value": [0.1, 0.9]}],
                "density": 0.5,
            },
        },
        {"model": "b", "parameters": {"weight": 0.5, "density": 0.5}},
    ],
    "parameters": {"normalize": True, "int8_mask": False},
    "dtype": "float32",
    "tokenizer_source": "base",
}
RECIPE: dict[str, Any] = {
    "method": "weighted_sum",
    "a": "base.safetensors",
    "b": {
        "method": "add_difference",
        "a": "a.safetensors",
        "b": {"model": "b.safetensors", "merge_space": "weight"},
        "c": "base.safetensors",
        "alpha": 0.5,
    },
    "alpha": {"default": 0.5, "w": 0.25},
}
MODEL_CONFIG = {
    "identifier": "mine-tiny",
    "components": {"unet": {"keys": {"w": [4]}, "blocks": {"one": ["w"]}}},
}


def _space() -> tuple[Any, Any]:
    from mecha_exp.app.search.samplers import Sampler
    from mecha_exp.app.search.space import Dimension, Space

    return Space((Dimension("alpha", high=1.0),), {"": {}}), Sampler("tpe", 1)


def _trials() -> object:
    from mecha_exp.app.search.trials import read_trials

    return read_trials(Path(), *_space())


def _learning() -> object:
    from mecha_exp.app.adaptive.optimiser import Adam
    from mecha_exp.app.adaptive.progress import Progress, read_progress

    zeros = np.zeros((1, 2))
    return read_progress(
        Path("learning-a.json"), "key", Progress(Adam(zeros, zeros, zeros, 0, 0.1, 0, 1), (), {})
    )


def _store() -> None:
    from mecha_exp.lab.store import ResultStore

    store = ResultStore(Path("store"))
    for merge in store:
        merge.renamed(["x"])
    store.get("a1")
    store.failures("a1", ["e"])
    store.evaluation("e", "a1")
    store.sweep_folder("k")
    store.lost_sweeps()


def _statistics() -> None:
    from mecha_exp.sources.statistics.header import StatisticsHeader

    with _opened("stats.safetensors") as source:
        StatisticsHeader.of(source)
    command("info", "stats.safetensors")


def _record_commands() -> None:
    from mecha_exp.runs.record import Record

    Record.load(Path("run"))
    for words in (("ls", "--in", "."), ("show", "run"), ("diff", "run", "run2")):
        command(*words)


def _run_files() -> None:
    command("reproduce", "run")


def _plan_with(config_dir: str) -> None:
    command("plan", "recipe=mine", "--config-dir", config_dir, "tracking=none")


SWEEPS = ("grid", "search", "gradient", "greedy_soup", "points", "shapley", "subsets", "random", "latin")


@functools.cache
def settings_of_a_run() -> dict[str, Any]:
    """Every setting of a run on the bundled demo, and of the sweeps."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    chosen = ["recipe=weighted_sum", "evaluator=digits", "output=none", "tracking=none", "store=store2"]
    with initialize_config_module("mecha_exp.conf", version_base=None):
        config = OmegaConf.to_container(compose("config", chosen))
        for mode in SWEEPS:
            swept = OmegaConf.to_container(compose("config", [*chosen, f"sweep={mode}"]))
            config["sweep"] = {**swept["sweep"], **config["sweep"]}
    config["models"]["experts"] = config["models"]["experts"][:1]
    return {name: value for name, value in config.items() if name not in ("recipe", "hydra")}


def _leaves(settings: dict[str, Any], place: str = "") -> dict[str, Any]:
    """Settings by their names on a command line, groups among them."""
    named = {}
    for name, value in settings.items():
        named[f"{place}{name}"] = value
        if isinstance(value, dict):
            named |= _leaves(value, f"{place}{name}.")
    return named


def _write_experiment(raw: bytes) -> None:
    path = Path("conf/experiment/mine.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"# @package _global_\n" + raw)


def _write_words(raw: bytes) -> None:
    Path("words.json").write_bytes(raw)


def _read_words() -> None:
    """A command with the settings that are not as in the valid document, or with all of an unreadable one."""
    raw, valid = Path("words.json").read_text("utf-8", "replace"), _leaves(settings_of_a_run())
    try:
        given = json.loads(raw)
        changed = {k: v for k, v in given.items() if k not in valid or json.dumps(v) != json.dumps(valid[k])}
        words = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in changed.items()]
    except (ValueError, RecursionError, AttributeError):
        words = [f"alpha={raw[:2000]}"]
    if any(word.startswith("sweep") for word in words):
        words += ["alpha=0.3,0.5", f"sweep={SWEEPS[len(raw) % len(SWEEPS)]}", "-m"]
    command("recipe=weighted_sum", "output=none", "tracking=none", "evaluator=digits", *words)


def _recipe() -> None:
    from mecha_exp.documents import read_yaml
    from mecha_exp.recipe.text import serialize
    from mecha_exp.recipe.yaml_reader import build_recipe

    serialize(build_recipe(read_yaml(Path("recipe.yaml"))))


def _text_recipe() -> None:
    from mecha_exp.recipe.files import read_recipe_text

    read_recipe_text(Path("r.mecha"))
    command("show", "r.mecha")


def _peft() -> None:
    from mecha_exp.peft.config import read_config

    read_config(Path("lora"))
    shutil.rmtree("lora-out", ignore_errors=True)
    command("adapters", "lora", "lora2", "--rank", "1", "-o", "lora-out")


def _lora_metadata() -> None:
    from mecha_exp.peft.metadata import with_alphas

    with _opened("diffusers.safetensors") as source:
        with_alphas(source)


def _model_folder() -> None:
    from mecha_exp.checkpoint.quantisation import quantisation_of, quantization_config
    from mecha_exp.evaluators.common.folders import ModelFolder

    folder = ModelFolder(Path("a"))
    assert folder.config is not None and folder.contents is not None
    assert folder.has_chat_template in (True, False) and folder.size_of_vocabulary >= 0
    quantization_config(Path("a"))
    with _opened("a") as model:
        quantisation_of(model)
    command("info", "a")
    shutil.rmtree("out", ignore_errors=True)
    command("merge", "folders.mecha", "-o", "out")


def _components() -> None:
    from mecha_exp.evaluators.common.folders import ModelFolder
    from mecha_exp.evaluators.pictures.components import components_of

    components_of(ModelFolder(Path("pipe")))


def _index() -> None:
    from mecha_exp.checkpoint.folder import read_index

    read_index(Path("shards/model.safetensors.index.json"))
    _open_model("shards")


def _model_config() -> None:
    from mecha_exp.architectures import from_yaml

    from_yaml(Path("mine.yaml").read_bytes().decode("utf-8", "replace"), "mine.yaml")


def _mergekit() -> None:
    from mecha_exp.mergekit import from_mergekit
    from mecha_exp.mergekit.documents import paths_in
    from mecha_exp.recipe.text import serialize

    paths_in(Path("merge.yml"))
    serialize(from_mergekit("merge.yml"))


def _tables(name: str) -> Callable[[], object]:
    def read() -> object:
        from mecha_exp.evaluators.common.tables import read_rows

        return read_rows(Path(name))

    return read


def _points() -> object:
    from mecha_exp.lab.points import read_points

    return read_points(Path("points.csv"))


def _names() -> object:
    from mecha_exp.evaluators.vision.heads import listed

    return listed("names.yaml", "task", "classes")


def _card() -> None:
    from mecha_exp.publishing.licences import front_matter_of, licence_of

    front_matter_of(Path("base/README.md"))
    licence_of(Path("base"))


def _lm_task() -> object:
    from mecha_exp.evaluators.harness.tasks import local_files

    return local_files(["task.yaml"], None)


def _outcomes() -> object:
    from mecha_exp.evaluation.outcome_table import decode
    from mecha_exp.runs.outcomes import read_outcomes

    with contextlib.suppress(ValueError):
        decode(Path("outcomes.parquet").read_bytes())
    return read_outcomes(Path("outcomes.parquet"))


def _sources() -> object:
    from mecha_exp.app.reproduction.sources import restore_plugins

    return restore_plugins(Path("kept"), ["gone.py"], Path("scratch"))


def _lock() -> None:
    from mecha_exp.checkpoint.transaction.lock import _owner

    _owner(Path("lock").read_bytes().decode("utf-8", "replace"))


def _journal() -> None:
    from mecha_exp.checkpoint.transaction.journal import read_journal

    read_journal(Path("journal"), "s", 1)


def _quantised() -> None:
    from mecha_exp.checkpoint.quantisation import codes_of, layers_of, quantisation_of

    with _opened("comfy.safetensors") as model:
        layers_of(model)
        codes_of(model)
        quantisation_of(model)
    command("info", "comfy.safetensors")


def _dequantised() -> None:
    Path("out.safetensors").unlink(missing_ok=True)
    command("merge", "comfy.mecha", "-o", "out.safetensors", "engine.on_quantised=dequantise")


def _partial() -> None:
    from mecha_exp.evaluation.context import _read

    _read(Path("partial"), "w")


def make_kinds() -> list[Kind]:
    """All kinds; the current folder gets what they need."""
    from mecha_exp.engine.provenance import Origin
    from mecha_exp.evaluation.outcomes import Outcomes
    from mecha_exp.lab.stored_results import ModelFile, StoredMerge
    from mecha_exp.recipe.text import serialize
    from mecha_exp.recipe.yaml_reader import build_recipe
    from mecha_exp.runs.outcomes import MeasuredOutcomes, write_outcomes
    from mecha_exp.runs.record import Record, json_ready
    from mecha_exp.runs.sweep import Sweep
    from mecha_exp.sources.statistics.header import METADATA, StatisticsHeader

    write_models(Path())
    recipe = serialize(build_recipe(RECIPE))
    Path("r.mecha.valid").write_text(recipe)
    comfy_recipe = {
        "method": "weighted_sum",
        "a": "comfy.safetensors",
        "b": "plain.safetensors",
        "alpha": 0.5,
    }
    Path("comfy.mecha").write_text(serialize(build_recipe(comfy_recipe)))
    save_file({"m.weight": torch.ones(4, 4)}, "plain.safetensors")
    Path("folders.mecha").write_text(
        serialize(build_recipe({"method": "weighted_sum", "a": "base", "b": "a", "alpha": 0.5}))
    )
    origin = {**asdict(Origin()), "inputs": [], "engine": {"compute_dtype": "auto", "on_tied": "error"}}
    origin |= {"output": {"dtype": "float32"}, "methods": {"weighted_sum": "0"}, "versions": {"torch": "2"}}
    record = Record(
        "alpha=0.5", parameters={"recipe": "weighted_sum", "input/base": "base.safetensors", "alpha": 0.5},
        metrics={"accuracy": 0.5, "time/merge_seconds": 1.0}, tags={"git/commit": "0", "version/torch": "2"},
        metric="accuracy", directions={"accuracy": "maximize"}, references={"base": {"accuracy": 0.25}},
        overrides=["alpha=0.5"], units={"accuracy": "%"}, signature="a1b2c3d4",
        evaluations={"": "e"}, race={"key": "n"}, origin=origin, base="base",
    )  # fmt: skip
    sweep = Sweep("sweep", ["alpha"], ["python", "-m", "mecha_exp"], 2, notes=["n"], input_runs={"base": "1"})
    Path("run2").mkdir()
    record.save(Path("run2"))
    for number in ("0", "1"):
        Path("sweep", number).mkdir(parents=True)
        record.save(Path("sweep", number))
        Path("sweep", number, "recipe.yaml").write_text("recipe: {title: T}\nplugins: []\n")
        Path("sweep", number, "recipe.mecha").write_text(recipe)
    words = ("recipe=weighted_sum", "models.base=base.safetensors", "models.experts=[a.safetensors]")
    command(*words, "alpha=0.5", "hydra.run.dir=run", "tracking=none", "evaluator=none", "output.path=null")
    settings = yaml.safe_load(Path("run/recipe.yaml").read_text())
    plain = json.loads(Path("run/run.json").read_text()) | {
        "references": {"base": {"accuracy": 0.25}}, "units": {"accuracy": "%"},
        "block_weights": {"alpha": {"w": 0.5}},
        "metrics": {"accuracy": 0.5, "time/merge_seconds": 1.0}, "metric": "accuracy", "race": {"key": "n"},
    }  # fmt: skip
    for name in ("shards", "pipe/unet", "kept", "conf/recipe", "store/points/a1", "store/sweeps"):
        Path(name).mkdir(parents=True)
    save_file(tensors(1), "shards/model-00001-of-00001.safetensors")
    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(MODEL, "model-00001-of-00001.safetensors"),
    }
    merge = StoredMerge(
        "a1", {"recipe": "r"}, ["base"], {"x": 0.1}, "input,block\nbase,one\n", model=ModelFile("m", "0", 1)
    )
    header = StatisticsHeader(
        "a", "", "f", "d", "", 1, 0, "true", ("fisher",), {"w": 1}, {"fisher": {"w": ("F32", [4])}}
    )
    outcomes = MeasuredOutcomes("point", 0, "a", "accuracy", "all", Outcomes({"t": [0.0, 1.0]}))
    write_outcomes([outcomes], Path("valid.parquet"))
    torch.save({"state_dict": {"w": torch.ones(4)}}, "zip.pt")
    torch.save({"w": torch.ones(4)}, "old.pt", _use_new_zipfile_serialization=False)
    comfy = {"m.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "m.weight_scale": torch.ones(())}
    layers = {"layers": {"m": {"format": "float8_e4m3fn", "params": {"convrot": False}}}}
    lm_task = {
        "task": "t",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "base.safetensors"}},
    }
    trials = {
        "space": _space()[0].description,
        "sampler": str(_space()[1]),
        "trials": [{"parameters": {"alpha": 0.5}, "state": {}}],
    }
    learning = {
        "key": "key",
        "adam": {"raw": [[0, 1]], "mean": [[0, 0]], "square": [[0, 0]], "steps": 1},
        "kept": {"0": [[0.5, 0.5]]},
        "losses": [0.5],
    }
    evaluation = {
        "evaluator": "e",
        "metrics": {"x": 1.0},
        "outcomes": False,
        "checksum": "",
        "beside": "b",
        "files": {},
    }
    from mecha_exp.lab.store import _short_hash

    of_model = _with_header(
        "merged.safetensors", {"w": torch.ones(4)}, "mecha_origin", {"mecha_recipe": recipe}
    )
    of_statistics = _with_header("stats.safetensors", {"fisher/w": torch.ones(4)}, METADATA, {})
    of_lora = _with_header(
        "diffusers.safetensors",
        {"transformer.q.lora_A.weight": torch.ones(2, 4), "transformer.q.lora_B.weight": torch.ones(4, 2)},
        "lora_adapter_metadata",
        {},
    )
    of_comfy = _with_header("comfy.safetensors", comfy, "_quantization_metadata", {})
    words = _leaves(settings_of_a_run())
    alphas = {"transformer.r": 2, "transformer.lora_alpha": 4, "transformer.target_modules": ["q"]}
    return [
        Kind("origin, merged again", "", origin, lambda: _merge("merged.safetensors"), 0.7, write=of_model),
        Kind(
            "origin, reproduced",
            "",
            origin,
            lambda: command("reproduce", "merged.safetensors"),
            0.5,
            write=of_model,
        ),
        Kind("recipe in YAML", "recipe.yaml", RECIPE, _recipe, 4, is_yaml=True),
        Kind(
            "recipe of --config-dir",
            "conf/recipe/mine.yaml",
            RECIPE,
            lambda: _plan_with("conf"),
            0.15,
            is_yaml=True,
        ),
        Kind(
            "settings of --config-dir",
            "",
            settings_of_a_run(),
            lambda: command("experiment=mine", "--config-dir", "conf", "recipe=weighted_sum", "output=none"),
            0.5,
            is_yaml=True,
            write=_write_experiment,
        ),
        Kind("settings on a command line", "", words, _read_words, 0.7, write=_write_words),
        Kind("recipe as text", "r.mecha", recipe.encode(), _text_recipe, 3),
        Kind("PEFT's adapter_config.json", "lora/adapter_config.json", PEFT, _peft, 3),
        Kind("adapters in a LoRA's header", "", alphas, _lora_metadata, 3, write=of_lora),
        *(
            Kind(name, f"a/{name}", content, _tokenizer, 3)
            for name, content in (
                ("tokenizer.json", TOKENIZER),
                ("tokenizer_config.json", TOKENIZER_CONFIG),
                ("special_tokens_map.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}}),
                ("added_tokens.json", {"abc": 7}),
                ("vocab.json", {"a": 0, "b": 1}),
                ("generation_config.json", {"eos_token_id": [1, 2], "do_sample": True}),
            )
        ),
        *(
            Kind(f"{name}, of mergekit's tokens", f"a/{name}", content, _mergekit_templates, 0.3)
            for name, content in (("tokenizer.json", TOKENIZER), ("tokenizer_config.json", TOKENIZER_CONFIG))
        ),
        Kind("run.json", "run/run.json", plain, _record_commands, 2),
        Kind("recipe.yaml of a run", "run/recipe.yaml", settings, _run_files, 0.5, is_yaml=True),
        Kind("recipe.mecha of a run", "run/recipe.mecha", recipe.encode(), _run_files, 0.3),
        Kind(
            "sweep.json",
            "sweep/sweep.json",
            json_ready(asdict(sweep), repr),
            lambda: command("table", "sweep"),
            1,
        ),
        Kind(
            "recipe.yaml of a point",
            "sweep/0/recipe.yaml",
            {"recipe": {"title": "T"}, "plugins": ["p"]},
            lambda: command("table", "sweep", "--markdown"),
            0.5,
            is_yaml=True,
        ),
        Kind("store.json", "store/store.json", {"version": 1}, _store, 1),
        Kind("merge.json of the store", "store/points/a1/merge.json", asdict(merge), _store, 3),
        Kind("failure.json of the store", "store/points/a1/failure.json", {"": "it failed"}, _store, 1),
        Kind(
            "evaluation.json of the store",
            f"store/points/a1/evaluation-{_short_hash('e')}.json",
            evaluation,
            _store,
            2,
        ),
        Kind("sweeps of the store", "store/sweeps/k.json", {"folder": "sweep"}, _store, 1),
        Kind("trials of a search", "trials.json", trials, _trials, 2),
        Kind("progress of learning", "learning-a.json", learning, _learning, 2),
        Kind("header of statistics", "", asdict(header), _statistics, 2, write=of_statistics),
        Kind("mergekit's YAML", "merge.yml", MERGEKIT, _mergekit, 4, is_yaml=True),
        Kind("model config", "mine.yaml", MODEL_CONFIG, _model_config, 4, is_yaml=True),
        Kind("config.json", "a/config.json", CONFIG, _model_folder, 2),
        Kind("index of shards", "shards/model.safetensors.index.json", index, _index, 3),
        Kind(
            "model_index.json",
            "pipe/model_index.json",
            {"_class_name": "P", "unet": ["diffusers", "U"], "x": [None, None]},
            _components,
            2,
        ),
        Kind("layers of ComfyUI", "", layers, _quantised, 2, write=of_comfy),
        Kind("layers of ComfyUI, read", "", layers, _dequantised, 0.5, write=of_comfy),
        Kind("rows in JSON", "rows.json", [{"text": "a", "label": 1}], _tables("rows.json"), 1),
        Kind(
            "rows in lines of JSON", "rows.jsonl", b'{"text": "a"}\n{"text": "b"}\n', _tables("rows.jsonl"), 1
        ),
        Kind("rows in CSV", "rows.csv", b"text,label\na,1\nb,2\n", _tables("rows.csv"), 1),
        Kind("points in CSV", "points.csv", b"alpha,k\n0.5,1\n0.25,2\n", _points, 1),
        Kind("names of classes", "names.yaml", ["cat", "dog"], _names, 1, is_yaml=True),
        Kind(
            "front matter of a card",
            "base/README.md",
            b"---\nlicense: other\nlicense_name: x\n---\n# A\n",
            _card,
            1,
            is_yaml=True,
        ),
        Kind("task of lm_eval", "task.yaml", lm_task, _lm_task, 1, is_yaml=True),
        Kind("outcomes", "outcomes.parquet", Path("valid.parquet").read_bytes(), _outcomes, 1),
        Kind("sources of plugins", "kept/sources.json", {"gone.py": "x = 1"}, _sources, 1),
        Kind("lock", "lock", {"pid": 1, "host": "h"}, _lock, 1),
        Kind("journal", "journal", b"00000000 []\n", _journal, 1),
        Kind("parts of a measurement", "partial", b'{"work": "w", "values": [1.0], "of": 2}\n', _partial, 1),
        Kind("pickle", "zip2.pt", Path("zip.pt").read_bytes(), lambda: _open_model("zip2.pt"), 2),
        Kind("pickle, old format", "old2.pt", Path("old.pt").read_bytes(), lambda: _open_model("old2.pt"), 2),
        Kind(
            "safetensors",
            "bytes.safetensors",
            Path("base.safetensors").read_bytes(),
            lambda: _open_model("bytes.safetensors"),
            2,
        ),
    ]
