"""Small keys are computed together, and nothing tells: not the bytes, not the messages, not a resumed run."""

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from written import digest

import mecha_exp as me
from mecha_exp import Parameter, Return, merge_method
from mecha_exp.checkpoint import CheckpointWriter, open_stored
from mecha_exp.engine import EngineOptions, Job, merge_many
from mecha_exp.engine.planner.by_key import parse_output_dtype
from mecha_exp.engine.planner.planner import plan
from mecha_exp.engine.runtime import small_keys
from mecha_exp.errors import CheckpointError, MergeError

KEYS = 8 * small_keys.MANY
SHAPES = [(10,), (3, 5), (), (7, 1, 2), (600,)]


def a_model(path: Path, seed: int, dtypes=(torch.float16, torch.float32)) -> Path:
    """A model of many small keys, of two dtypes, with a large key and a counter among them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"layer.{n}.weight": torch.randn(SHAPES[n % 5], generator=generator).to(dtypes[n % 7 == 0])
        for n in range(KEYS)
    }
    tensors["embedding"] = torch.randn(300, 100, generator=generator)
    tensors["steps"] = torch.tensor([7])
    save_file(tensors, path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [str(a_model(folder / f"{seed}.safetensors", seed)) for seed in range(3)]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys were made together at a time."""
    counts: list[int] = []
    made_together = small_keys.ComputeTogether._is_made_together

    def counted(self, scratch) -> bool:
        done = made_together(self, scratch)
        counts.append(len(self.keys) if done else 0)
        return done

    monkeypatch.setattr(small_keys.ComputeTogether, "_is_made_together", counted)
    return counts


def one_by_one(recipe, monkeypatch: pytest.MonkeyPatch, options=None) -> dict[str, torch.Tensor]:
    output: dict[str, torch.Tensor] = {}
    with monkeypatch.context() as patched:
        patched.setattr(small_keys, "MANY", 10**9)
        merge_many([Job(recipe, output)], options)
    return output


@merge_method(elementwise=True, register=False)
def shifted(a: Parameter(torch.Tensor), by: Parameter(torch.Tensor, "param")) -> Return(torch.Tensor):
    """a + by, whose dtype is that of the arithmetic."""
    return a + by


RECIPES = {
    "weighted_sum": lambda a, b, c: me.weighted_sum(a, b, alpha=0.3),
    "add_difference": lambda a, b, c: me.add_difference(a, b, c, alpha=0.7),
    "by block": lambda a, b, c: me.weighted_sum(a, b, alpha={"layer.1*": 0.1, "default": 0.6}),
    "clamp": lambda a, b, c: me.clamp(a, b, c),
    "slerp": lambda a, b, c: me.slerp(a, b, alpha=0.3),
    "ties": lambda a, b, c: me.add_difference_ties(a, b, c, alpha=0.7, k=0.2),
    "ties of the model": lambda a, b, c: me.ties(a, b, c, density=0.2, variant="official"),
    "breadcrumbs": lambda a, b, c: me.breadcrumbs(a, b, c, density=0.7, gamma=0.1),
    "draws": lambda a, b, c: me.dare_ties(a, b, c, density=0.5, seed=3),
    "draws and ranks": lambda a, b, c: me.add_ties_with_dare(a, b, c, probability=0.4, k=0.2),
    "perpendicular": lambda a, b, c: me.add_perpendicular(a, b, c, alpha=0.7),
    "several numbers of each key": lambda a, b, c: me.multislerp(a, b, c),
    "a reduction of a reduction": lambda a, b, c: shifted(a, me.dot(b, shifted(c, me.dot(a, b)))),
}


@pytest.mark.parametrize("name", RECIPES)
def test_bytes_are_those_of_keys_made_one_by_one(name, models, joined, monkeypatch):
    recipe = RECIPES[name](*models)
    expected = one_by_one(recipe, monkeypatch)
    assert not torch.equal(expected["layer.4.weight"], load_file(models[0])["layer.4.weight"])
    for tile_size, fuse in product([64, 1 << 19], ["auto", "always"]):
        joined.clear()
        output: dict[str, torch.Tensor] = {}
        merge_many([Job(recipe, output)], EngineOptions(tile_size=tile_size, fuse=fuse))
        assert sum(joined) > KEYS // 2
        assert output.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(output[key], expected[key])] == []


def test_keys_of_many_draws_go_by_themselves(models, joined, monkeypatch):
    monkeypatch.setattr(small_keys, "MOST_DRAWS", 9)
    merge_many([Job(RECIPES["draws"](*models), {})])
    assert 0 < sum(joined) <= KEYS // 5 + 1  # those of one element


@pytest.mark.parametrize("output", ["model.safetensors", "folder"])
def test_files_and_shards_are_the_same(output, models, joined, monkeypatch, tmp_path):
    recipe = me.weighted_sum(models[0], models[1], alpha=0.3)
    shard_size = 20_000 if output == "folder" else None
    merge_many([Job(recipe, tmp_path / output, shard_size=shard_size)])
    assert sum(joined) > KEYS // 2
    again = me.weighted_sum(str(tmp_path / output), models[2], alpha=0.4)  # which reads the shards together
    once, twice = one_by_one(recipe, monkeypatch), {}
    with open_stored(tmp_path / output) as stored:
        assert all(torch.equal(stored.read(key), once[key]) for key in once)
    merge_many([Job(again, twice)])
    expected = one_by_one(again, monkeypatch)
    assert all(torch.equal(twice[key], expected[key]) for key in expected)


def test_several_jobs_share_a_pass(models, joined, monkeypatch):
    recipes = [me.weighted_sum(models[0], models[1], alpha=alpha) for alpha in (0.2, 0.9)]
    outputs: list[dict[str, torch.Tensor]] = [{}, {}]
    merge_many([Job(recipe, output) for recipe, output in zip(recipes, outputs, strict=True)])
    assert joined
    for recipe, output in zip(recipes, outputs, strict=True):
        expected = one_by_one(recipe, monkeypatch)
        assert all(torch.equal(output[key], expected[key]) for key in expected)


@merge_method(elementwise=True)
def power_of_two(a: Parameter(torch.Tensor), b: Parameter(torch.Tensor)) -> Return(torch.Tensor):
    """a 2^b, entry by entry: the end of a tile may be rounded otherwise than its middle."""
    return a * b.exp2()


@merge_method(elementwise=True, register=False)
def raised(a: Parameter(torch.Tensor), to: Parameter(torch.Tensor, "param")) -> Return(torch.Tensor):
    """a 2^to, whose factor is computed from one number alone."""
    return a * to.exp2()


@pytest.mark.parametrize(
    "recipe",
    [
        lambda a, b, c: power_of_two(a, b),
        lambda a, b, c: me.n_model_stock(a, b, c),
        lambda a, b, c: raised(a, me.dot(a, b)),
    ],
    ids=["library functions", "rows", "a function of a number of each key"],
)
def test_what_looks_further_than_an_entry_goes_by_itself(recipe, models, joined):
    merge_many([Job(recipe(*models), {})])
    assert not joined


def test_a_value_that_is_not_finite_is_reported_with_its_key(models, tmp_path):
    tensors = load_file(models[1])
    tensors["layer.33.weight"][..., 0] = torch.inf
    save_file(tensors, tmp_path / "spoilt.safetensors")
    recipe = me.weighted_sum(models[0], str(tmp_path / "spoilt.safetensors"), alpha=0.3)
    with pytest.raises(
        MergeError, match=r"spoilt.*: the key 'layer\.33\.weight' has values that are not fin"
    ):
        merge_many([Job(recipe, {})])
    kept = merge_many([Job(recipe, {})], EngineOptions(on_nonfinite="keep"))
    assert kept.nonfinite_values == (int(tensors["layer.33.weight"].isinf().sum()),)


@pytest.mark.parametrize("name", ["slerp", "ties"])
def test_keys_of_reductions_are_named_as_well(name, models, joined, tmp_path):
    tensors = load_file(models[1])
    tensors["layer.33.weight"][..., 0] = torch.nan
    save_file(tensors, tmp_path / "spoilt.safetensors")
    recipe = RECIPES[name](models[0], str(tmp_path / "spoilt.safetensors"), models[2])
    with pytest.raises(MergeError, match=r"spoilt.*: the key 'layer\.33\.weight' has values that are not"):
        merge_many([Job(recipe, {})])
    assert 0 in joined and sum(joined) > 0


@pytest.mark.parametrize("name", ["slerp", "ties"])
def test_values_that_are_not_finite_are_kept_and_counted_alike(name, models, joined, monkeypatch, tmp_path):
    tensors = load_file(models[1])
    tensors["layer.33.weight"][..., 0] = torch.nan
    tensors["layer.44.weight"][..., 0] = torch.inf
    save_file(tensors, tmp_path / "spoilt.safetensors")
    recipe = RECIPES[name](models[0], str(tmp_path / "spoilt.safetensors"), models[2])
    options, output = EngineOptions(on_nonfinite="keep"), {}
    report = merge_many([Job(recipe, output)], options)
    assert sum(joined) > KEYS // 2
    expected = one_by_one(recipe, monkeypatch, options)
    assert all(torch.equal(output[key].nan_to_num(1e4), expected[key].nan_to_num(1e4)) for key in expected)
    assert report.nonfinite_values == (sum(int((~v.isfinite()).sum()) for v in expected.values()),)


def test_an_overflow_is_counted_and_reported_with_its_key(models, joined):
    recipe = me.weighted_sum(models[0], models[1], alpha=1e6)
    report = merge_many([Job(recipe, {}, dtype=torch.float16)])
    assert report.nonfinite_values[0] > 1000
    assert not any(joined)  # they were made again one by one
    options = EngineOptions(strict=True, workers=1)  # of several, one may say it of the large key first
    with pytest.raises(MergeError, match=r"the key 'layer\.\d+\.weight' of the output has"):
        merge_many([Job(recipe, {}, dtype=torch.float16)], options)


@pytest.mark.parametrize("shard_size", [None, 20_000])
def test_keys_with_overflows_are_written_once(shard_size, models, joined, monkeypatch, tmp_path):
    fits = Job(me.weighted_sum(models[0], models[1], alpha=0.3), tmp_path / "fits", shard_size=20_000)
    recipe = me.weighted_sum(models[0], models[1], alpha=1e6)
    path = tmp_path / ("folder" if shard_size else "model.safetensors")
    overflows = Job(recipe, path, dtype=torch.float16, shard_size=shard_size)
    report = merge_many([fits, overflows])
    assert report.nonfinite_values[0] == 0 and report.nonfinite_values[1] > 1000
    assert 0 in joined
    for job in (fits, overflows):
        expected: dict[str, torch.Tensor] = {}
        with monkeypatch.context() as patched:
            patched.setattr(small_keys, "MANY", 10**9)
            merge_many([Job(job.recipe, expected, dtype=job.dtype)])
        with open_stored(job.output) as stored:
            assert all(torch.equal(stored.read(key), expected[key]) for key in expected)


def test_progress_is_told_of_every_key(models, joined):
    told: dict[str, int] = {}
    recipe, options = me.weighted_sum(models[0], models[1], alpha=0.3), EngineOptions(workers=1)
    merge_many([Job(recipe, {})], options, lambda key, nbytes: told.update({key: told.get(key, 0) + nbytes}))
    assert joined
    with plan([Job(recipe, {})], options) as planned:
        assert told == {key.key: planned.bytes_of(key) for key in planned.keys}


def test_an_interrupted_run_goes_on_after_the_keys_that_were_made_together(models, joined, tmp_path):
    recipe, output = me.weighted_sum(models[0], models[1], alpha=0.3), tmp_path / "out.safetensors"
    merge_many([Job(recipe, tmp_path / "whole.safetensors")])
    options = EngineOptions(workers=1, tile_size=1 << 12)
    done = len(joined)

    def interrupt(key: str, nbytes: int) -> None:
        if len(joined) > done + 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_many([Job(recipe, output)], options, interrupt)
    report = merge_many([Job(recipe, output)], options)
    assert 30 < report.resumed_keys < KEYS
    whole, resumed = load_file(tmp_path / "whole.safetensors"), load_file(output)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert digest(output) == digest(tmp_path / "whole.safetensors")


def test_a_writer_refuses_values_that_do_not_fit(tmp_path):
    layout = {"a": ("F16", (3,)), "b": ("F16", (2,))}
    with CheckpointWriter(tmp_path / "out.safetensors", layout, {}) as writer:
        with pytest.raises(CheckpointError, match=r"a, b are not 5 values of torch\.float32"):
            writer.write_together({"a": 3, "b": 2}, torch.zeros(5))
        with pytest.raises(CheckpointError, match=r"a, b are not 5 values of torch\.float16"):
            writer.write_together({"a": 2, "b": 3}, torch.zeros(5, dtype=torch.float16))


def test_keys_that_are_alike_are_planned_once(models):
    with plan([Job(me.weighted_sum(models[0], models[1], alpha=0.3), {})]) as planned:
        assert len(planned.keys) == KEYS + 2
        assert len(planned.structures) == 2 * len(SHAPES) + 2
        assert sum(planned.structures.values()) == KEYS + 2
        tensors = [tensor for path in models[:2] for tensor in load_file(path).values()]
        assert planned.bytes_read == sum(map(planned.bytes_of, planned.keys))
        assert planned.bytes_read == sum(tensor.nbytes for tensor in tensors)


def test_keys_that_are_alike_but_for_their_names_differ_where_names_count(models):
    dtype = parse_output_dtype({"layer.10.weight": "bfloat16"})
    with plan([Job(me.weighted_sum(models[0], models[1], alpha=0.3), {}, dtype=dtype)]) as planned:
        layout, (first, last) = planned.layouts[0], ("layer.10.weight", "layer.15.weight")
        assert (layout[first], layout[last]) == (("BF16", (10,)), ("F16", (10,)))
        structures = {key.key: key.structure for key in planned.keys}
        assert structures[first].stored == structures[last].stored


def test_models_with_one_header_share_it_while_they_are_open(models):
    with open_stored(Path(models[0])) as first, open_stored(Path(models[1])) as second:
        assert first.info("layer.3.weight") is second.info("layer.3.weight")
