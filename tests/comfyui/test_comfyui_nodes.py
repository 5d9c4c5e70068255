"""The nodes for ComfyUI, run by the rules that ComfyUI documents for nodes.

ComfyUI is not in the package index, so its own modules are stood in for: `folder_paths`, `comfy.sd`,
`comfy.utils` and `comfy.model_management`, with the few functions that the nodes call. The executor below
takes a workflow in ComfyUI's API format and checks what ComfyUI checks: required inputs, choices, ranges and
types of links.
"""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mecha_exp as me
from mecha_exp.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from mecha_exp.comfyui import install as verb
from mecha_exp.comfyui.nodes import BlockWeightsNode
from mecha_exp.errors import ConfigError, RecipeError
from mecha_exp.method_api.registry import all_methods

WIDGETS = {"FLOAT": float, "INT": int, "BOOLEAN": bool, "STRING": str}


class Interrupted(Exception):
    """What ComfyUI raises when its user cancels."""


@pytest.fixture
def comfy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of ComfyUI that nodes use, with three checkpoints, and what was done with them."""
    checkpoints, output = tmp_path / "models" / "checkpoints", tmp_path / "output"
    checkpoints.mkdir(parents=True)
    output.mkdir()
    torch.manual_seed(0)
    for name in "abc":
        state = {"model.diffusion.weight": torch.randn(8, 8), "encoder.bias": torch.randn(8)}
        save_file(state, checkpoints / f"{name}.safetensors")
    host = SimpleNamespace(checkpoints=checkpoints, output=output, moved=0, is_cancelled=False, loaded=None)

    paths = ModuleType("folder_paths")
    paths.folder_names_and_paths = {"checkpoints": ([str(checkpoints)], {".safetensors"})}
    paths.get_filename_list = lambda kind: sorted(p.name for p in checkpoints.glob("*.safetensors"))
    paths.get_full_path = lambda kind, name: next((str(p) for p in checkpoints.glob(name)), None)
    paths.get_folder_paths = lambda kind: [str(tmp_path / "models" / kind)]
    paths.get_output_directory = lambda: str(output)

    def load(state_dict, output_vae, output_clip, embedding_directory):
        host.loaded = state_dict
        return ("model", "clip", "vae", None) if "model.diffusion.weight" in state_dict else None

    class Bar:
        def __init__(self, total: int) -> None:
            host.total = total

        def update(self, value: int) -> None:
            host.moved += value

    def check() -> None:
        if host.is_cancelled:
            raise Interrupted

    modules = {"folder_paths": paths, "comfy": ModuleType("comfy")}
    for name, members in {
        "sd": {"load_state_dict_guess_config": load},
        "utils": {"ProgressBar": Bar},
        "model_management": {"throw_exception_if_processing_interrupted": check},
    }.items():
        modules[f"comfy.{name}"] = ModuleType(f"comfy.{name}")
        vars(modules[f"comfy.{name}"]).update(members)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return host


def run(prompt: dict[str, Any], node: str) -> Any:
    """The outputs of a node of a workflow, after those that it is linked to."""
    entry = prompt[node]
    cls = NODE_CLASS_MAPPINGS[entry["class_type"]]
    declared = cls.INPUT_TYPES()
    known = {**declared["required"], **declared.get("optional", {})}
    assert declared["required"].keys() <= entry["inputs"].keys(), "required inputs are missing"
    assert entry["inputs"].keys() <= known.keys(), "unknown inputs"
    values = {}
    for name, value in entry["inputs"].items():
        kind, options = known[name]
        if isinstance(value, list):
            source = NODE_CLASS_MAPPINGS[prompt[value[0]]["class_type"]]
            assert source.RETURN_TYPES[value[1]] == kind, "the types of a link differ"
            values[name] = run(prompt, value[0])[value[1]]
        else:
            check_widget(kind, options, value)
            values[name] = value
    result = getattr(cls(), cls.FUNCTION)(**values)
    return result.get("result", ()) if isinstance(result, dict) else result


def check_widget(kind: Any, options: dict[str, Any], value: Any) -> None:
    if isinstance(kind, list):
        assert value in kind
        return
    assert isinstance(value, WIDGETS[kind])
    assert options.get("min", value) <= value <= options.get("max", value)


def defaults(kind: str, /, **given: Any) -> dict[str, Any]:
    """A node with its widgets as they are at first."""
    declared = NODE_CLASS_MAPPINGS[kind].INPUT_TYPES()
    widgets = {k: o["default"] for k, (_, o) in declared["required"].items() if "default" in o}
    return {"class_type": kind, "inputs": {**widgets, **given}}


def models(*names: str) -> dict[str, Any]:
    return {n: defaults("mecha_exp:model", file=f"checkpoints/{n}.safetensors") for n in names}


def test_a_workflow_merges_to_a_file_as_python_does(comfy, tmp_path):
    prompt = {
        **models("a", "b", "c"),
        "blocks": defaults("mecha_exp:block_weights", values="encoder* = 0.25\n\n"),
        "ties": defaults(
            "mecha_exp.add_difference_ties",
            base=["a", 0], model_1=["b", 0], model_3=["c", 0],
            k=0.5, alpha=0.75, alpha_by_block=["blocks", 0],
        ),
        "file": defaults("mecha_exp:merge_to_file", recipe=["ties", 0], name="sub/merged"),
    }  # fmt: skip
    (path,) = run(prompt, "file")

    files = [comfy.checkpoints / f"{n}.safetensors" for n in "abc"]
    alpha = {"encoder*": 0.25, "default": 0.75}
    me.merge(me.add_difference_ties(*files, alpha=alpha, k=0.5), tmp_path / "expected.safetensors")
    assert Path(path) == comfy.checkpoints / "sub" / "merged.safetensors"
    expected = load_file(tmp_path / "expected.safetensors")
    for key, tensor in load_file(path).items():
        assert torch.equal(tensor, expected[key])
    assert 0 < comfy.moved == comfy.total


def test_a_workflow_merges_in_memory(comfy):
    prompt = {
        **models("a", "b"),
        "sum": defaults("mecha_exp.weighted_sum", a=["a", 0], b=["b", 0], alpha=0.3),
        "merge": defaults("mecha_exp:merge", recipe=["sum", 0], dtype="float16"),
    }
    assert run(prompt, "merge") == ("model", "clip", "vae")
    assert {tensor.dtype for tensor in comfy.loaded.values()} == {torch.float16}


def test_a_cancelled_merge_ends_and_leaves_no_file(comfy):
    comfy.is_cancelled = True
    prompt = {**models("a"), "file": defaults("mecha_exp:merge_to_file", recipe=["a", 0])}
    with pytest.raises(Interrupted):
        run(prompt, "file")
    assert not (comfy.checkpoints / "merged.safetensors").exists()


def test_recipes_are_written_and_read_with_their_parameters(comfy):
    prompt = {
        **models("a", "b"),
        "sum": defaults("mecha_exp.weighted_sum", a=["a", 0], b=["b", 0], alpha=0.3),
        "save": defaults("mecha_exp:save_recipe", recipe=["sum", 0], name="new/mine"),
    }
    run(prompt, "save")
    path = comfy.output / "new" / "mine.mecha"
    prompt["load"] = defaults("mecha_exp:load_recipe", path=str(path))
    (loaded,) = run(prompt, "load")
    assert me.serialize(loaded) == me.serialize(run(prompt, "sum")[0])

    template = me.weighted_sum(me.parameter("x"), me.parameter("y"), alpha=0.3)
    me.serialize_and_save(template, path)
    sockets = {"parameter_1": ["a", 0], "parameter_2": ["b", 0]}
    prompt["load"] = defaults("mecha_exp:load_recipe", path=str(path), parameters="x, y", **sockets)
    assert me.serialize(run(prompt, "load")[0]) == me.serialize(loaded)
    prompt["load"]["inputs"]["parameters"] = "x"
    with pytest.raises(RecipeError, match="parameters names 1, and 2 sockets are connected"):
        run(prompt, "load")
    prompt["load"]["inputs"]["parameters"] = "x, x"
    with pytest.raises(RecipeError, match="parameters names 'x' twice"):
        run(prompt, "load")


@pytest.mark.parametrize("name", [name for name in NODE_CLASS_MAPPINGS if name.startswith("mecha_exp.")])
def test_every_method_has_a_node_that_calls_it(comfy, name):
    cls = NODE_CLASS_MAPPINGS[name]
    declared = cls.INPUT_TYPES()
    for widgets in declared.values():
        for kind, options in widgets.values():
            if "default" in options:
                check_widget(kind, options, options["default"])
    assert callable(getattr(cls(), cls.FUNCTION))
    assert cls.RETURN_TYPES == ("MECHA_RECIPE",)
    assert cls.DESCRIPTION and NODE_DISPLAY_NAME_MAPPINGS[name]
    sockets = {n for n, (kind, _) in declared["required"].items() if kind == "MECHA_RECIPE"}
    space = {spec.name: spec.spaces for spec in cls.METHOD.signature.parameters}
    if "statistics" in sockets or any(
        s == "" for s in (o.get("default") for _, o in declared["required"].values())
    ):
        return  # needs more than models
    nodes = {}
    for socket in sockets:
        spaces = space.get(socket) or space.get(socket.rpartition("_")[0] + "s") or ("weight",)
        model = defaults("mecha_exp:model", file="checkpoints/a.safetensors", merge_space=spaces[0])
        nodes[socket] = model
    prompt = {**nodes, "call": defaults(name, **{socket: [socket, 0] for socket in sockets})}
    (recipe,) = run(prompt, "call")
    assert recipe.method is cls.METHOD


def test_no_merge_method_is_forgotten():
    names = {
        m.identifier for m in all_methods() if m.function.__module__.startswith(("methods", "mecha_exp"))
    }
    without = {name for name in names if f"mecha_exp.{name}" not in NODE_CLASS_MAPPINGS}
    assert without == {"get_device", "get_dtype"}


def test_a_model_that_was_replaced_is_another(comfy):
    cls = NODE_CLASS_MAPPINGS["mecha_exp:model"]
    given = {"file": "checkpoints/a.safetensors", "merge_space": "weight"}
    before = cls.IS_CHANGED(**given)
    save_file({"w": torch.ones(1)}, comfy.checkpoints / "a.safetensors")
    assert cls.IS_CHANGED(**given) != before
    (comfy.checkpoints / "a.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"a\.safetensors: ComfyUI has no such file any more"):
        cls.IS_CHANGED(**given)
    assert inspect.signature(cls.IS_CHANGED)


def test_a_recipe_that_was_edited_and_a_model_in_it_that_was_replaced_are_others(comfy, monkeypatch):
    monkeypatch.setenv("HOME", str(comfy.output))
    path = comfy.output / "mine.mecha"
    cls, given = NODE_CLASS_MAPPINGS["mecha_exp:load_recipe"], {"path": "~/mine.mecha", "parameters": ""}
    a, b = (comfy.checkpoints / f"{name}.safetensors" for name in "ab")
    states = []
    for change in (
        lambda: me.serialize_and_save(me.weighted_sum(a, b, alpha=0.3), path),
        lambda: me.serialize_and_save(me.weighted_sum(a, b, alpha=0.4), path),
        lambda: save_file({"w": torch.ones(1)}, b),
    ):
        change()
        states.append(cls.IS_CHANGED(**given))
        assert cls.IS_CHANGED(**given) == states[-1]
    assert len(set(states)) == 3


@pytest.mark.parametrize(
    ("name", "widgets", "written"),
    [
        ("ties", {"ties_kept": "true"}, "ties_kept=true"),
        ("ties", {"ties_kept": "none"}, None),
        ("randperm", {"seed": "3"}, "seed=3"),
        ("take_rows", {"rows": "0:3", "tokenizer": "/x/t.json"}, 'tokenizer="/x/t.json"'),
    ],
)
def test_what_no_number_says_has_a_widget(comfy, name, widgets, written):
    declared = NODE_CLASS_MAPPINGS[f"mecha_exp.{name}"].INPUT_TYPES()["required"]
    sockets = {n: ["a", 0] for n, (kind, _) in declared.items() if kind == "MECHA_RECIPE"}
    text = me.serialize(
        run({**models("a"), "m": defaults(f"mecha_exp.{name}", **sockets, **widgets)}, "m")[0]
    )
    assert written in text if written else next(iter(widgets)) not in text


@pytest.mark.parametrize(
    ("name", "widgets", "error"),
    [
        ("randperm", {"seed": "2.5"}, r"seed: expected a whole number, got '2\.5'"),
        ("pick_component", {}, "component is empty, and it has no default: such as `vae`"),
    ],
)
def test_texts_that_are_not_arguments_are_refused(comfy, name, widgets, error):
    prompt = {**models("a"), "m": defaults(f"mecha_exp.{name}", a=["a", 0], **widgets)}
    with pytest.raises(ConfigError, match=error):
        run(prompt, "m")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("IN00 = 1\ndefault = 2", "line 2: the other blocks have the number of the method's own widget"),
        ("IN00", "line 1: expected a block and a number such as IN04 = 0.3, got 'IN00'"),
        ("IN00 = 1\nIN01 = x", "line 2: expected a block and a number"),
        ("IN00 = 1\nIN00 = 2", "line 2: 'IN00' has a value already"),
    ],
)
def test_block_weights_that_are_not_numbers_are_refused(text, error):
    with pytest.raises(ConfigError, match=error):
        BlockWeightsNode().read(text)


def test_what_cannot_be_done_is_said(comfy, tmp_path):
    prompt = {
        **models("a", "b"),
        "file": defaults("mecha_exp:merge_to_file", recipe=["a", 0], name="../../x"),
    }
    with pytest.raises(ConfigError, match=r"name: expected a name below .*checkpoints, got"):
        run(prompt, "file")
    prompt["linear"] = defaults("mecha_exp.linear", model_1=["a", 0], model_2=["b", 0], weights="0.3, many")
    with pytest.raises(
        ConfigError, match=r"weights: expected numbers with commas between them, got '0\.3, many'"
    ):
        run(prompt, "linear")
    save_file({"w": torch.ones(2)}, comfy.checkpoints / "a.safetensors")
    prompt["merge"] = defaults("mecha_exp:merge", recipe=["a", 0])
    with pytest.raises(ConfigError, match="ComfyUI does not know the architecture of the merged model"):
        run(prompt, "merge")


def test_the_folder_that_install_writes_has_the_nodes(tmp_path, capsys, monkeypatch):
    nodes = tmp_path / "ComfyUI" / "custom_nodes"
    nodes.mkdir(parents=True)
    monkeypatch.chdir(nodes)
    for folder in (nodes, nodes.parent, Path()):
        assert verb.main(["install", str(folder)]) == 0
    assert "start ComfyUI again" in capsys.readouterr().out
    file = nodes / "mecha_exp_nodes" / "__init__.py"
    spec = importlib.util.spec_from_file_location("custom", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.NODE_CLASS_MAPPINGS is NODE_CLASS_MAPPINGS
    (tmp_path / "custom_nodes").mkdir()
    (tmp_path / "custom_nodes" / "mecha_exp_nodes").touch()
    with pytest.raises(ConfigError, match=r"mecha_exp_nodes cannot be written: File exists"):
        verb.main(["install", str(tmp_path / "custom_nodes")])
    (tmp_path / "custom_nodes" / "mecha_exp_nodes").unlink()
    (tmp_path / "custom_nodes").rmdir()
    with pytest.raises(ConfigError, match="is not a folder of ComfyUI: there is no custom_nodes in it"):
        verb.main(["install", str(tmp_path)])
