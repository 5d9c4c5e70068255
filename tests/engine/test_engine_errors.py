"""What may go wrong in a merge: it is said before data is read where it can be, and leaves nothing behind."""

import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from state_dicts import StateDict, random_model
from torch import Tensor

import mecha_exp
from mecha_exp import (
    EngineOptions,
    Job,
    Node,
    Parameter,
    Return,
    merge,
    merge_many,
    merge_method,
    model,
    n_average,
    plan,
    slerp,
    weighted_sum,
)
from mecha_exp.errors import CheckpointError, ConfigError, MechaError, MergeError, RecipeError
from mecha_exp.sources.search import find_model

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="files and rights of POSIX")


@merge_method(elementwise=True, register=False)
def shorten(a: Parameter(Tensor)) -> Return(Tensor):
    """Says that it is elementwise, and is not for tiles of six."""
    return a[:-1] if len(a) == 6 else a


@merge_method(elementwise=True, register=False)
def explode(a: Parameter(Tensor)) -> Return(Tensor):
    """Fails on what it is given."""
    raise ValueError("it is Tuesday")


@merge_method(register=False)
def transpose(a: Parameter(Tensor)) -> Return(Tensor):
    """Returns another shape."""
    return a.t()


@merge_method(register=False)
def measure(a: Parameter(Tensor)) -> Return(Tensor):
    """Returns no tensor."""
    return float(a.sum())


@merge_method(composite=True, register=False)
def hollow(a: Parameter(Tensor)) -> Return(Tensor):
    """Returns no node."""
    return None


def error_of(kind: type[MechaError], recipe: Node, output: Path | None = None, dtype=None, **options) -> str:
    with pytest.raises(kind) as error:
        merge(recipe, output, EngineOptions(**options), dtype)
    return str(error.value)


def error_before_reading(kind: type[MechaError], jobs: list[Job], **options) -> str:
    with pytest.raises(kind) as error, plan(jobs, EngineOptions(**options)):
        pass
    return str(error.value)


def without(state_dict: StateDict, *keys: str) -> StateDict:
    return {key: tensor for key, tensor in state_dict.items() if key not in keys}


class TestKeys:
    @pytest.fixture
    def paths(self, save):
        first = save("first", without(random_model(0), "column"))
        return first, save("second", without(random_model(1), "one", "scalar"))

    def test_a_missing_key_is_an_error_that_names_keys_files_and_cures(self, paths):
        said = error_before_reading(CheckpointError, [Job(n_average(*paths), {})])

        assert said.startswith("2 problems:")
        assert f"{paths[0]} lacks 1 of the 9 keys that the other inputs have: column. " in said
        assert re.search(
            re.escape(paths[1]) + r" lacks 2 of the 9 keys .* (one, scalar|scalar, one)\. ", said
        )
        assert "on_missing=skip leaves such keys out, on_missing=base takes them from the first" in said

    def test_at_most_ten_missing_keys_are_listed(self, save):
        many = save("many", {f"layer.{i:02}": torch.ones(1) for i in range(25)})
        few = save("few", {"layer.00": torch.ones(1)})

        said = error_before_reading(CheckpointError, [Job(n_average(many, few), {})])

        assert f"{few} lacks 24 of the 25 keys" in said
        assert "layer.01, layer.02" in said
        assert "layer.10 and 14 more." in said

    def test_keys_that_several_inputs_lack_are_listed_once(self, save):
        whole, *others = (save(name, random_model(i)) for i, name in enumerate(("whole", "b", "c")))
        few = [save(name, without(random_model(i), "column")) for i, name in enumerate(("d", "e", "f"))]

        said = error_before_reading(CheckpointError, [Job(n_average(whole, *others, *few), {})])

        assert said.startswith(f"{few[0]} and {few[1]} and {few[2]} lack 1 of the 9 keys")
        assert said.count("column") == 1

    def test_skip_leaves_them_out_and_warns(self, paths):
        target: StateDict = {}

        report = merge_many([Job(n_average(*paths), target)], EngineOptions(on_missing="skip"))

        assert set(target) == set(random_model(0)) - {"column", "one", "scalar"}
        (warning,) = report.warnings
        assert warning.startswith("3 keys are not in every input and are left out: ")

    def test_base_takes_them_unchanged_from_the_first_input_that_has_them(self, paths):
        merged = merge(n_average(*paths), options=EngineOptions(on_missing="base"))

        first, second = map(load_file, paths)
        assert set(merged) == set(random_model(0))
        assert torch.equal(merged["one"], first["one"])
        assert torch.equal(merged["column"], second["column"])
        assert torch.equal(merged["conv.weight"], (first["conv.weight"] + second["conv.weight"]) / 2)

    def test_each_point_of_a_batch_has_the_keys_of_its_own_inputs(self, paths):
        alone, both = {}, {}
        jobs = [Job(model(paths[0]), alone), Job(n_average(*paths), both)]

        merge_many(jobs, EngineOptions(on_missing="skip"))

        assert set(alone) == set(load_file(paths[0]))
        assert set(both) == set(load_file(paths[0])) & set(load_file(paths[1]))


class TestShapes:
    def test_each_key_of_another_shape_is_listed_up_to_ten_with_the_count(self, save, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)  # short names: a message of many long paths is cut
        wide = save("wide", {f"layer.{i:02}": torch.ones(2, 3) for i in range(12)} | {"same": torch.ones(1)})
        long = save("long", {f"layer.{i:02}": torch.ones(3, 2) for i in range(12)} | {"same": torch.ones(1)})
        wide, long = Path(wide).name, Path(long).name

        said = error_before_reading(CheckpointError, [Job(slerp(wide, long), {})])

        assert said.startswith("12 keys have shapes that differ between the inputs:")
        assert f"\n    layer.00: [2, 3] in {wide}, [3, 2] in {long}\n" in said
        assert len(re.findall(r"layer\.\d\d: ", said)) == 10
        assert "\n    and 2 more\n" in said
        assert "Only models of one architecture can be merged." in said

    def test_a_tensor_that_fits_some_keys_only_is_an_error(self, save):
        state_dict = {f"layer.{i}": torch.ones(2, 3) for i in range(4)} | {"zz": torch.ones(7)}
        paths = save("a", state_dict), save("b", state_dict)

        for workers in (1, 2):
            said = error_of(MergeError, weighted_sum(*paths, alpha=torch.ones(2, 3)), workers=workers)
            assert "a tensor of shape [2, 3] is given where the key 'zz' has [7]" in said


@pytest.fixture
def public_folder():
    """Below folders that everybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextlib.contextmanager
def as_nobody():
    """Without the rights of the administrator, who may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


class TestFiles:
    def test_every_input_that_cannot_be_read_is_named(self, save, tmp_path):
        good = save("experts", {"w": torch.ones(1)})
        (tmp_path / "broken.safetensors").write_bytes(b"not a checkpoint")
        recipe = n_average(good, str(tmp_path / "exprets.safetensors"), str(tmp_path / "broken.safetensors"))

        said = error_before_reading(CheckpointError, [Job(recipe, {})])

        assert said.startswith("2 problems:")
        assert "exprets.safetensors' does not exist." in said
        assert "Did you mean 'experts.safetensors'" in said
        assert "broken.safetensors" in said

    @posix_only
    @pytest.mark.parametrize("name", ["odd", "odd.safetensors"])
    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (
                lambda path: path.symlink_to(path),
                r"odd\.safetensors is a symbolic link that leads back to itself",
            ),
            (
                lambda path: path.symlink_to("gone"),
                r"odd\.safetensors is a link to gone, which does not exist",
            ),
            (lambda path: os.mkfifo(path), r"odd\.safetensors is a pipe, a socket or a device"),
            (Path.mkdir, r"odd\.safetensors is a folder without a model in it"),
        ],
        ids=["loop", "dangling", "pipe", "folder"],
    )
    def test_what_lies_there_and_is_no_model_is_named_with_the_cause(self, make, said, name, tmp_path):
        make(tmp_path / "odd.safetensors")

        with pytest.raises(CheckpointError, match=said):
            merge(n_average(str(tmp_path / name)))

    @posix_only
    @pytest.mark.parametrize("name", ["closed", "closed/model.safetensors", "unreadable.safetensors"])
    def test_what_may_not_be_read_says_so(self, name, public_folder):
        (public_folder / "closed").mkdir(mode=0)
        (public_folder / "unreadable.safetensors").touch(mode=0)

        with as_nobody(), pytest.raises(CheckpointError, match=f"{name} cannot be read: no permission"):
            merge(n_average(str(public_folder / name)))

    def test_an_output_is_never_an_input(self, models, tmp_path):
        paths = models(2)
        link = tmp_path / "link.safetensors"
        link.symlink_to(paths[1])
        before = Path(paths[1]).read_bytes()

        for output in (Path(paths[1]), link, paths[1]):
            said = error_before_reading(CheckpointError, [Job(n_average(*paths), output)])
            assert "is the input" in said
            assert "Write to another path." in said
            assert error_of(CheckpointError, n_average(*paths), output) == said
        assert Path(paths[1]).read_bytes() == before

    def test_outputs_go_to_paths_of_their_own(self, models, tmp_path):
        paths = models(2)
        (tmp_path / "sub").mkdir()
        outputs = [tmp_path / "out.safetensors", tmp_path / "sub" / ".." / "out.safetensors"]

        said = error_before_reading(CheckpointError, [Job(n_average(*paths), output) for output in outputs])

        assert said.startswith("two outputs go to ")
        assert "Give each its own path." in said

    def test_an_output_that_cannot_be_written_is_known_before_reading(self, models, tmp_path):
        (tmp_path / "taken.safetensors").mkdir()

        said = error_before_reading(
            CheckpointError, [Job(n_average(*models(2)), tmp_path / "taken.safetensors")]
        )

        assert "taken.safetensors is a folder" in said


class TestRecipes:
    def test_a_recipe_without_a_model_makes_nothing(self):
        said = error_before_reading(RecipeError, [Job(n_average(0.5), {})])

        assert "reads no model, so there is nothing to merge" in said

    @pytest.mark.parametrize(
        ("given", "hint"),
        [
            (torch.nn.Linear(2, 2), r"The state dict of a module is module\.state_dict\(\)"),
            ([{"w": torch.ones(1)}], r"method\(a, b\) in place of method\(\[a, b\]\)"),
        ],
        ids=["module", "list"],
    )
    def test_what_is_given_in_place_of_models_has_a_hint(self, given, hint):
        with pytest.raises(RecipeError, match=hint):
            n_average(given)

    def test_plain_tensors_are_models_of_one_key_each(self):
        said = error_before_reading(RecipeError, [Job(n_average(torch.ones(2), torch.ones(2)), {})])

        assert 'there is nothing to merge: a plain tensor is a model of one key, as in {"w": tensor}' in said

    def test_a_recipe_of_one_number_a_key_is_no_model(self, models):
        (path,) = models(1)

        said = error_before_reading(RecipeError, [Job(mecha_exp.norm(path), {})])

        assert "the recipe norm(a) gives one number for a key, not a tensor" in said

    def test_a_pattern_that_matches_no_key_is_an_error(self, models):
        recipe = weighted_sum(*models(2), alpha={"conv": 0.3, "covn2": 0.1, "fc": 1, "default": 0.5})

        said = error_before_reading(RecipeError, [Job(recipe, {})])

        assert "the pattern 'covn2' matches none of the 9 keys (" in said
        assert "Did you mean 'conv'?" in said
        assert "the pattern 'fc' matches none" in said

    def test_a_key_without_a_value_is_an_error(self, models):
        said = error_before_reading(RecipeError, [Job(weighted_sum(*models(2), alpha={"conv": 0.3}), {})])

        assert "none of ['conv'] holds the key" in said

    def test_a_composite_says_what_is_wrong_with_its_arguments(self, models):
        recipe = mecha_exp.task_arithmetic(*models(3), weights=[1, 2, 3])

        said = error_before_reading(RecipeError, [Job(recipe, {})])

        assert said == "task_arithmetic: 3 weights are given for 2 models. Give one number, or 2."

    def test_a_composite_that_returns_no_node_is_named(self, models):
        (path,) = models(1)

        said = error_before_reading(RecipeError, [Job(hollow(path), {})])

        assert said == "the composite 'hollow' returned NoneType, not a node"

    def test_whole_tensors_that_do_not_fit_the_budget_are_named_with_their_bytes(self, models):
        recipe = transpose(models(1, large=((1000, 1000), torch.float16))[0])

        said = error_before_reading(MergeError, [Job(recipe, {})], memory_budget=7_999_999)

        assert "the key 'large' needs 8,000,000 bytes for whole tensors" in said
        assert "more than memory_budget=7,999,999" in said
        with plan([Job(recipe, {})], EngineOptions(memory_budget=8_000_000)) as planned:
            assert planned.whole_bytes == 8_000_000


class TestMethods:
    @pytest.mark.parametrize("workers", [1, 4])
    @pytest.mark.parametrize(
        ("method", "said"),
        [
            (explode, "the merge method 'explode' failed on the key 'w': ValueError: it is Tuesday"),
            (
                shorten,
                "the merge method 'shorten' gave 5 values for a tile of 6 of the key 'w', so it is not",
            ),
            (transpose, "'transpose' turned the key 'w' of shape [2, 3] into [3, 2]"),
            (measure, "'measure' returned float, not a tensor"),
        ],
    )
    def test_a_method_that_fails_is_named_with_its_key(self, save, method, said, workers, tmp_path):
        path = save("m", {"w": torch.ones(2, 3)})

        assert said in error_of(MergeError, method(path), tmp_path / "out.safetensors", workers=workers)
        assert [file.name for file in tmp_path.iterdir()] == ["m.safetensors"]

    def test_the_cause_is_kept(self, save):
        with pytest.raises(MergeError) as error:
            merge(explode(save("m", {"w": torch.ones(1)})))

        assert isinstance(error.value.__cause__, ValueError)


class TestNumbers:
    @pytest.fixture
    def spoilt(self, save):
        tensors = random_model(0)
        tensors["proj.weight"][3, 4] = torch.nan
        tensors["proj.weight"][5, 6] = torch.inf
        return save("spoilt", tensors)

    @pytest.mark.parametrize("make", [n_average, slerp, mecha_exp.add_difference_ties])
    def test_nan_and_infinity_in_an_input_are_an_error_that_names_file_and_key(self, make, spoilt, models):
        said = error_of(MergeError, make(spoilt, models(1)[0]))

        assert said.startswith(f"{spoilt}: the key 'proj.weight' has values that are not finite (2 NaN or ")
        assert "on_nonfinite=keep" in said

    def test_they_are_kept_where_they_are_wanted(self, spoilt, models):
        target: StateDict = {}

        report = merge_many(
            [Job(n_average(spoilt, models(1)[0]), target)], EngineOptions(on_nonfinite="keep")
        )

        assert target["proj.weight"].isfinite().logical_not().nonzero().tolist() == [[3, 4], [5, 6]]
        assert report.nonfinite_values == (2,)
        assert "2 values of the output" in report.warnings[0]

    def test_what_overflows_the_output_is_counted(self, save, models):
        large = save("large", {"w": torch.tensor([60000.0, 1.0, -70000.0]), "v": torch.tensor([1e30])})
        targets: list[StateDict] = [{}, {}]
        recipe = weighted_sum(large, large, alpha=0.25)

        report = merge_many([Job(recipe, targets[0], torch.float16), Job(recipe, targets[1], torch.bfloat16)])

        assert report.nonfinite_values == (2, 0)
        assert targets[0]["w"].tolist() == [60000.0, 1.0, -torch.inf]
        assert len(report.warnings) == 1

    def test_strict_makes_it_an_error(self, save, tmp_path):
        large = save("large", {"w": torch.tensor([60000.0, 1.0, -70000.0])})

        said = error_of(MergeError, model(large), tmp_path / "out.safetensors", torch.float16, strict=True)

        assert "the key 'w' of the output has 1 value that is not finite in torch.float16" in said
        assert not (tmp_path / "out.safetensors").exists()


class TestNothingIsLeftBehind:
    def test_after_an_error_the_folder_is_as_it_was(self, save, tmp_path):
        good = {"w": torch.ones(300_000)}
        paths = save("a", good), save("b", good | {"w": torch.full((300_000,), torch.nan)})
        (tmp_path / "old.safetensors").write_bytes(b"what was there before")
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        target: StateDict = {"kept": torch.ones(1)}
        jobs = [Job(model(paths[0]), tmp_path / "new.safetensors"), Job(n_average(*paths), target)]
        jobs += [Job(model(paths[0]), tmp_path / "old.safetensors")]

        with pytest.raises(MergeError):
            merge_many(jobs, EngineOptions(tile_size=4096))

        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        assert list(target) == ["kept"]

    @pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
    def test_a_merge_can_be_stopped_from_its_progress(self, kind, models, tmp_path):
        paths = models(2)
        before = sorted(tmp_path.iterdir())

        def stop(key: str, nbytes: int) -> None:
            raise kind("enough")

        with pytest.raises(kind, match="enough"):
            merge_many([Job(slerp(*paths), tmp_path / "out.safetensors")], progress=stop)

        assert sorted(tmp_path.iterdir()) == before

    def test_an_input_that_changes_meanwhile_is_noticed(self, models, tmp_path, save):
        paths = models(2)

        def change(key: str, nbytes: int) -> None:
            save("model_1", random_model(7))

        with pytest.raises(CheckpointError, match=r"model_1\.safetensors changed while it was being read"):
            merge_many([Job(n_average(*paths), tmp_path / "out.safetensors")], progress=change)
        assert not (tmp_path / "out.safetensors").exists()

    def test_a_finished_file_replaces_the_old_one(self, models, tmp_path):
        (tmp_path / "out.safetensors").write_bytes(b"what was there before")

        merge(n_average(*models(2)), tmp_path / "out.safetensors")

        assert set(load_file(tmp_path / "out.safetensors")) == set(random_model(0))
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "model_0.safetensors", "model_1.safetensors", "out.safetensors",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"compute_dtype": torch.float16},
            "compute_dtype: expected auto, float32 or float64, got torch.float16",
        ),
        ({"compute_dtype": "flaot32"}, "unknown dtype 'flaot32'. Did you mean"),
        ({"workers": 0}, "workers: expected a positive whole number, got 0"),
        ({"tile_size": 1.5}, "tile_size: expected a positive whole number, got 1.5"),
        ({"memory_budget": True}, "memory_budget: expected a positive whole number, got True"),
        ({"on_missing": "skpi"}, "on_missing: unknown choice 'skpi'. Did you mean 'skip'?"),
        ({"on_extra": "drop"}, "on_extra: unknown choice 'drop'."),
        ({"on_nonfinite": "drop"}, "on_nonfinite: unknown choice 'drop'."),
    ],
)
def test_options_are_checked(options, said):
    with pytest.raises(ConfigError) as error:
        EngineOptions(**options)

    assert str(error.value).startswith(said)


def test_a_key_that_is_no_floating_point_in_one_of_the_inputs(save):
    floats = save("floats", {"w": torch.ones(3)})
    integers = save("integers", {"w": torch.ones(3, dtype=torch.int64)})

    with pytest.raises(CheckpointError) as caught:
        merge(mecha_exp.weighted_sum(floats, integers))

    assert "1 key has kinds of numbers that differ between the inputs" in str(caught.value)
    assert f"w: floating point in {floats}, I64 in {integers}" in str(caught.value)


def test_missing_keys_shapes_and_outputs_are_reported_together(save):
    whole = save("whole", {"a": torch.ones(3), "b": torch.ones(2)})
    other = save("other", {"a": torch.ones(4)})

    with pytest.raises(CheckpointError) as caught:
        merge(mecha_exp.weighted_sum(whole, other), whole)

    for words in ("3 problems", "lacks 1 of the 2 keys", "shapes that differ", "which would be destroyed"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("bsae", " Did you mean 'base'?"),
        ("experts/bsae.safetensors", " Did you mean 'base.safetensors'?"),
        ("experts/unlike.safetensors", " Known: a.safetensors, base.safetensors."),
    ],
)
def test_the_nearest_file_or_folder_of_a_model_is_named(tmp_path: Path, monkeypatch, path: str, hint: str):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "experts").mkdir()
    for name in ("a", "base"):
        save_file({"w": torch.ones(1)}, tmp_path / "experts" / f"{name}.safetensors")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(CheckpointError) as raised:
        find_model(path, [], offline=True)

    assert str(raised.value).endswith(hint)


class TestModelsGivenTwice:
    @pytest.fixture
    def files(self, tmp_path: Path) -> list[str]:
        paths = [str(tmp_path / f"{name}.safetensors") for name in "abc"]
        for number, path in enumerate(paths):
            save_file({"w": torch.full((4,), float(number))}, path)
        return paths

    def test_a_model_that_is_given_twice_is_warned_of(self, files):
        (warning,) = merge_many([Job(n_average(files[0], files[0], files[1]), {})]).warnings

        assert warning == (
            f"n_average: models: one model is given 2 times, and counts as often: {files[0]}, {files[0]}. "
            "Leave out all but one, unless that is meant."
        )

    @posix_only
    def test_also_by_another_name_of_its_file(self, files, tmp_path):
        other = tmp_path / "other.safetensors"
        other.symlink_to(files[1])

        (warning,) = merge_many([Job(mecha_exp.ties(files[0], files[1], str(other)), {})]).warnings

        assert f"one model is given 2 times, and counts as often: {files[1]}, {other}. " in warning

    def test_a_model_in_two_roles_is_not(self, files):
        recipe = mecha_exp.add_difference(files[0], files[1], files[0], alpha=0.5)

        assert not merge_many([Job(recipe, {}), Job(n_average(*files), {})]).warnings
