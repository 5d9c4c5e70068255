"""What people type: it works, or one message names the word and the command that is meant."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp.app.words.blocks import block_words

DIGITS = Path(__file__).parents[3] / "examples" / "digits"
MODELS = ("base", "expert_0_3", "expert_4_6")
HARD_NAMES = ("dream shaper (v8), pruned=1", "[Lah] it's", "été ~ 50%", "{a}", "a,b", "-x", "$x & y; 'z'")
PLAN = "debug=plan"


@pytest.fixture
def models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models in the current folder, which is the home folder too."""
    for name in MODELS:
        shutil.copy(DIGITS / f"{name}.safetensors", folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    return folder


def _names_of_plan(out: str) -> list[str]:
    """The inputs in a plan."""
    return re.findall(r"^ *(\S.*?) +8 +212", out, re.MULTILINE)


WORKS = [
    "models.experts.3=base.safetensors",
    "+models.experts.3=base.safetensors",
    "+models.experts=base.safetensors",
    "models.experts=expert_0_3.safetensors",
    "recipe=weighted_sum models.experts=expert_0_3.safetensors",
    "'models.experts=[expert_0_3.safetensors, expert_4_6.safetensors]'",
    "models.base=~/base.safetensors",
    "'models.base=\"~/base.safetensors\"'",
    "'models.experts=[~/expert_0_3.safetensors, ~/expert_4_6.safetensors]'",
    "models.dir=~ models.base=base.safetensors",
    "recipe=weighted_sum 'blocks.conv*=0.3'",
    "recipe=weighted_sum 'blocks.conv*=0.3' 'blocks.fc*=0.7'",
    "recipe=weighted_sum 'blocks={*conv1*: 0.9}'",
    "recipe=weighted_sum 'blocks.re:conv[12]=0.9'",
    "recipe=weighted_sum blocks.conv1.weight=0.9",
    "recipe=weighted_sum blocks.conv1.weight=0.9 blocks.conv1=0.3",
    "recipe=weighted_sum 'blocks.conv*=0.3,0.5' -m",
    "recipe=linear weights.0=0.5",
    "recipe=linear weights.0=0.5,1 -m",
    "recipe=linear weights.expert_4_6=0.5,1 -m",
    "recipe=linear 'models.experts=[base.safetensors,\"expert_4_6.safetensors\"]' weights.expert_4_6=0.5",
    "recipe=linear weights=[1,1,1] weights.0=0.5,1 -m",
    "recipe=linear 'weights.0=interval(0,1)' sweep=random sweep.n=3 -m",
    "recipe=linear 'weights.*=0.5,1' weights.1=1 -m",
    "recipe=linear models.experts=expert_0_3.safetensors 'weights.*=0.5,1' -m",
    "recipe=linear weights.0=0.5,1 weights=[1,1,1] -m",
    "recipe=linear 'weights.expert_*=interval(0,1)' sweep=random sweep.n=3 -m",
    "recipe=task_arithmetic 'blocks.conv*=interval(0,1)' blocks.conv2=0.1 sweep=latin sweep.n=3 -m",
    "recipe=task_arithmetic alpha=[0.1,0.5,0.9] 'alpha.*=0.3,0.5' alpha.1=0 -m",
    "recipe=task_arithmetic alpha=[0.1,0.5,0.9] 'alpha.*=interval(0,1)' sweep=random sweep.n=2 -m",
    "+models.experts=base.safetensors,expert_0_3.safetensors -m",
    "alpha=0.3,0.5 'output.path=${hydra:runtime.output_dir}/hf' -m",
    "alpha=0.3,0.5 'output.path=out-${hydra:job.num}.safetensors' -m",
    "'output.path=merged (v2).safetensors'",
]


def test_the_weight_of_an_expert_goes_to_its_place(app, models):
    words = ["recipe=linear", "weights.expert_4_6=0.5", "output=none", "evaluator=none", "tracking=none"]

    outcome = app(*words)

    assert outcome.status == 0, outcome.err
    (record,) = (json.loads(path.read_text()) for path in models.glob("outputs/runs/*/run.json"))
    assert record["parameters"]["weights"] == [1.0, 0.5, 1.0]


def test_a_star_stands_for_each_name_apart_from_those_that_are_set_alone(app, models):
    words = [
        "recipe=task_arithmetic",
        "blocks.*=interval(0,1)",
        "blocks.fc2=0.5",
        "sweep=random",
        "sweep.n=4",
    ]

    outcome = app(*words, "weights.*=0.5,1", "output=none", "evaluator=none", "tracking=none", "-m")

    assert outcome.status == 0, outcome.err
    records = [json.loads(path.read_text()) for path in models.glob("outputs/multiruns/*/*/run.json")]
    blocks, weights = zip(
        *((r["parameters"]["blocks"], r["parameters"]["weights"]) for r in records), strict=True
    )
    assert all(set(of_point) == {"conv1", "conv2", "fc1", "fc2"} for of_point in blocks)
    assert {of_point["fc2"] for of_point in blocks} == {0.5}
    assert all(len({of_point[name] for name in ("conv1", "conv2", "fc1")}) == 3 for of_point in blocks)
    assert {value for of_point in weights for value in of_point} == {0.5, 1}


def test_an_expert_is_appended_to_a_list_that_stands_behind_it(app, models):
    listed, more = "models.experts=[expert_0_3.safetensors]", "+models.experts=expert_4_6.safetensors"
    words = ["recipe=linear", "output=none", "evaluator=none", "tracking=none"]

    assert app(*words, more, listed).status == 0

    (record,) = (json.loads(path.read_text()) for path in models.glob("outputs/runs/*/run.json"))
    inputs = {name for name in record["parameters"] if name.startswith("input/")}
    assert inputs == {"input/expert_0_3", "input/expert_4_6"}


NUMBERS = ["100", "007", "1.50", "1e3", "nan", "inf", "true", "null", "1_000"]


@pytest.mark.parametrize(
    "words",
    [
        ["models.experts=[{0},b]"],
        ["models.experts=[b]", "models.experts.0={0}", "+models.experts=b"],
        ["models.experts=b", "+models.experts={0}"],
        ["models.experts=[{0},b],[b,{0}]", "sweep=grid", "-m"],
    ],
)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_folder_that_is_called_like_a_number_is_a_path_in_a_list_too(app, folder, name, words):
    for each in (name, "b"):
        (folder / each).mkdir()
        save_file({"w": torch.ones(2)}, folder / each / "model.safetensors")

    outcome = app("recipe=lawa", *(word.format(name) for word in words), "evaluator=none", "output=none")

    assert outcome.status == 0, outcome.err
    for path in folder.glob("outputs/*/**/run.json"):
        inputs = {n: v for n, v in json.loads(path.read_text())["parameters"].items() if "input/" in n}
        assert inputs == {f"input/{name}": name, "input/b": "b"}


def test_sets_of_experts_may_be_called_like_numbers(app, folder):
    for name in ("100", "200", "nan", "007", "base"):
        (folder / name).mkdir()
        save_file({"w": torch.ones(2)}, folder / name / "model.safetensors")
    sets = ["models.base=base", "models.sets=[[100,200],[nan,007]]", "sweep.replicate=[experts]"]

    outcome = app("recipe=task_arithmetic", *sets, "alpha=0.1,0.2", "evaluator=none", "output=none", "-m")

    assert outcome.status == 0, outcome.err
    records = [json.loads(path.read_text()) for path in folder.glob("outputs/multiruns/*/*/run.json")]
    inputs = {tuple(name for name in r["parameters"] if "input/" in name) for r in records}
    assert inputs == {("input/base", "input/100", "input/200"), ("input/base", "input/nan", "input/007")}


def test_models_of_a_group_may_be_numbers(app, folder):
    for name in ("100", "200", "1.5"):
        (folder / "ckpt" / name).mkdir(parents=True)
        save_file({"w": torch.ones(2)}, folder / "ckpt" / name / "model.safetensors")
    (folder / "conf" / "models").mkdir(parents=True)
    (folder / "conf" / "models" / "steps.yaml").write_text("dir: ckpt\nbase: 100\nexperts: [200, 1.5]\n")

    outcome = app("--config-dir", "conf", "models=steps", "recipe=task_arithmetic", "evaluator=none", PLAN)

    assert outcome.status == 0, outcome.err
    assert "ckpt/1.5" in outcome.out


@pytest.mark.parametrize("command", WORKS)
def test_it_works(app, models, command):
    outcome = app(*shlex.split(command), PLAN)

    assert outcome.status == 0, outcome.err
    assert "Nothing was merged" in outcome.out


REFUSED = [
    ("models.experts.3=d.safetensors", "the model 'd.safetensors' does not exist."),
    ("models.experts.9=base.safetensors", "so the next one is models.experts.3=base.safetensors."),
    ("recipe=linear weights.expert_4=1", "no expert 'expert_4'. Did you mean 'expert_4_6'"),
    ("recipe=linear weights.x=1", "models.experts has no expert 'x'. Known: expert_0_3, expert_4_6"),
    ("recipe=linear 'weights.x*=0.5,1' -m", "weights.x*=0.5,1: no name is like it. Known: expert_0_3"),
    ("recipe=linear models.experts=null 'weights.*=0.5,1' -m", "weights.*=0.5,1: no name is like it."),
    (
        "recipe=task_arithmetic 'blocks.x*=interval(0,1)' sweep=random sweep.n=2 -m",
        "blocks.x*=interval(0,1): no name is like it. Known: conv1, conv2",
    ),
    (
        "recipe=task_arithmetic 'blocks.c?nv*=interval(0,1)' sweep=random sweep.n=2 -m",
        "only names and '*' can be drawn from a range. List the values: 'blocks.c?nv*=0.3,0.5'.",
    ),
    ("recipe=linear 'blocks.*=interval(0,1)' sweep=random sweep.n=2 -m", "takes no strength for each block"),
    (
        "recipe=task_arithmetic 'alpha.*=interval(0,1)' sweep=random sweep.n=2 -m",
        "alpha.*: alpha is 0.3 and not a list, whose items the star stands for. For a gradient over the "
        "layers, each of whose knots is searched, begin with as many: alpha=[0.5,0.5,0.5].",
    ),
    ("recipe=linear weights.7=0.5", "weights has 3 values, so the next one is weights.3=0.5."),
    (
        "recipe=weighted_sum blocks=[0,0.1,0.2]",
        "blocks=... has 3 numbers. A list of merge block weights",
    ),
    ("recipe=weighted_sum blocks=0.5", "one strength for all blocks is alpha=0.5."),
    ("models.base=~/x.safetensors", "x.safetensors' does not exist. Looked in "),
    ("'models.base=/m/dream (v8).st'", "Type: \"models.base='/m/dream (v8).st'\""),
    ("'models.base=/m/[Lah] it.st'", "Type: \"models.base='/m/[Lah] it.st'\""),
    ("'models.experts=[a (1).st, b.st]'", "Type: \"models.experts=['a (1).st',b.st]\""),
    (
        "models.experts=[a.st, b.st]",
        "one word in quotes: 'models.experts=[a.st, b.st]'",
    ),
    ("alpha 0.3", "a name and its value are one word: alpha=0.3"),
    ("alpha = 0.3", "a name and its value are one word: alpha=0.3"),
    ("=0.3", "has no name before its '='. Type it without spaces: alpha=0.3"),
    ("alpha==0.3", "Type: alpha=0.3"),
    ("alpha=0.1, -m", "Type: alpha=0.1"),
    ("1alpha=0.1", "Before the '=' stands the name of a key"),
    ("a.safetensors b.safetensors", "models.base=a.safetensors 'models.experts=[b.safetensors]'"),
    ("r.mecha", "'r.mecha' is a recipe. Type: python -m mecha_exp merge r.mecha"),
    ("help", "'help' is not a setting. Type: python -m mecha_exp --help"),
    ("methods", "Type: python -m mecha_exp info methods"),
    ("recipe=ties pln", "If the verb plan is meant, it is the first word"),
    ("--alpha 0.3", "'--alpha' is not a flag. Settings have no dashes: alpha=0.3."),
    ("--alpha=0.3", "Settings have no dashes: alpha=0.3."),
    ("--multirnu", "Did you mean '--multirun'?"),
    ("--config-dir", "--config-dir: the word after it is missing"),
    ("engine=gpu", "Did you mean engine=cuda?"),
    ("evaluator=bleurt", "An evaluator of a plugin is chosen by evaluator.name=bleurt."),
    ("recipe=mk/ties.yml", "python -m mecha_exp recipe=mergekit recipe.path=mk/ties.yml"),
    (
        "mk/ties.yml",
        "'mk/ties.yml' is a configuration of mergekit. Type: python -m mecha_exp merge mk/ties.yml OUTPUT",
    ),
    ("merge mk/ties.yml", "say where the model goes: python -m mecha_exp merge mk/ties.yml OUTPUT"),
    ("recipe=mk/own.yaml", "--config-dir FOLDER recipe=own"),
    ("recipe=r.mecha", "recipe=mecha recipe.path=r.mecha"),
    ("recipe=base.safetensors", "python -m mecha_exp merge base.safetensors"),
    ("alpha.conv1=0.3", "A block gets its own strength by blocks.conv1=0.3"),
    ("recipe.blocks.conv1=0.3", "A block gets its own strength by blocks.conv1=0.3"),
    ("recipe=weighted_sum blocks=grad_v", "there is no such preset of blocks. Did you mean 'GRAD_V'"),
    ("recipe=weighted_sum blocks.CONV1=0.3", "Did you mean 'conv1'"),
    ("recipe=TIES", "recipe=TIES: there is no such recipe. Did you mean 'ties'"),
    ("recipe=ties density=0.5", "The method's 'density' is the recipe's hyperparameter 'k'."),
    ("recipe=linear density=0.5", "'density' belongs to recipe=breadcrumbs"),
    ("recipe=slerp t=0.5", "the recipe 'slerp' has no 't'. It uses alpha."),
    ("recipe=slerp output.dtype=fp8", "unknown dtype 'fp8'. f8_e4m3 and f8_e5m2 store values as they are"),
    ("recipe=tis", "there is no such recipe. Did you mean 'ties'"),
    ("recipe=add_opposite_mas", "there is no such recipe. Did you mean 'add_opposite_mask'"),
    ("recipe=ties 'output.path=x/${recipe}'", "output.path: ${recipe} is a mapping or a list"),
    (
        "recipe=ties output.path=x.safetensors alpha=0.3,0.5 -m",
        "'output.path=merged/': each point has",
    ),
    (
        "recipe=linear 'weights=simplex(3)' sweep=random sweep.n=2 -m",
        "No function of such values is called 'simplex'. They are drawn by interval(0,1)",
    ),
    ("evaluator.name=none", "no evaluator is evaluator=none"),
    ("recipe=linear blocks.conv1.weight=0 'blocks.conv*=1'", "so conv1, conv* would not be used"),
    ("recipe=median blocks=GRAD_V", "so the preset GRAD_V would not be used"),
    ("recipe=linear blocks.conv1=0", "the recipe 'linear' takes no strength for each block, so conv1"),
    ("recipe=median blocks=GRAD_V,WRAP12 -m", "the recipe 'median' takes no strength for each block"),
    ("recipe=linear 'blocks.conv*=0'", "the recipe 'linear' takes no strength for each block"),
    (
        "recipe=weighted_sum models.experts=[base.safetensors,expert_0_3.safetensors]",
        "the recipe 'weighted_sum' merges models.base (still the demo's) and 1 of the 2 experts, so",
    ),
    (
        "recipe=lora models.experts=[base.safetensors,expert_0_3.safetensors]",
        "the recipe 'lora' merges models.base (still the demo's) and 1 of the 2 experts, so expert_0_3",
    ),
    ("recipe=linear models.base=base.safetensors", "merges the experts alone, so the base would not be used"),
    (
        "recipe=ties models.statistics=[a.safetensors]",
        "models.statistics: the recipe 'ties' does not read it, so it would not be used",
    ),
    ("recipe=ties models.data=[a.jsonl]", "such as regmean_plus_plus or df_merge"),
    ("recipe=fisher statistics=[a] models.statistics=[b]", "the recipe 'fisher' does not read it"),
    ("recipe=regmean statistics=[a] models.masks=[b]", "recipe that reads it, such as stitch"),
    (
        "+models.expert=x.safetensors",
        "nothing uses 'models.expert'. Did you mean 'experts'",
    ),
    ("+alhpa=0.3", "nothing uses 'alhpa'. Did you mean 'alpha'"),
    ("+seed=3", "+seed=3: nothing uses 'seed'."),
    ("alpha=[0.3,0.5] -m", "The sweep is alpha=0.3,0.5 -m, without brackets."),
    ("plugins=weird.py", "plugins: weird.py does not exist."),
    ("plugins=[wierd]", "plugins: there is no module, file or folder 'wierd'."),
    ("info slerp", "'slerp' is a merge method. Type: python -m mecha_exp info methods slerp"),
    ("info recipes", "python -m mecha_exp info methods"),
    ("info evaluators", "Evaluators are chosen by evaluator=auto, digits, none, weight_stats"),
]


@pytest.mark.parametrize(("command", "message"), REFUSED, ids=[command for command, _ in REFUSED])
def test_it_is_refused_with_the_command_that_is_meant(app, models, command, message):
    (models / "mk").mkdir()
    (models / "mk" / "ties.yml").write_text("merge_method: ties\nmodels: []\n")

    outcome = app(*([] if command.startswith(("info", "merge")) else [PLAN]), *shlex.split(command))

    assert outcome.status not in (0, None)
    assert message in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err + outcome.out
    assert outcome.err.count("error:") == 1 and len(outcome.err) <= 2000
    assert not (models / "outputs").exists()


def test_files_beside_the_experts_may_be_for_one_recipe_of_a_sweep(app, models):
    outcome = app("recipe=ties,fisher", "models.statistics=[base.safetensors]", "output=none", PLAN, "-m")

    assert "would not be used" not in outcome.err
    assert "base.safetensors" in outcome.out + outcome.err


def test_a_base_may_be_for_one_recipe_of_a_sweep(app, models):
    outcome = app("recipe=ties,linear", "models.base=base.safetensors", "output=none", PLAN, "-m")

    assert "would not be used" not in outcome.err
    assert "models.base: not of linear, which merges the experts alone" in outcome.out


def test_a_base_that_is_still_the_demos_is_named_where_experts_of_ones_own_do_not_fit_it(app, folder):
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, folder / f"{name}.safetensors")
    experts = "models.experts=[a.safetensors,b.safetensors]"

    of_any, of_one, of_its_own, without = (
        app(*words, "evaluator=none")
        for words in (
            ["recipe=ties", experts],
            ["recipe=weighted_sum", experts],
            ["recipe=ties", "models.base=none.safetensors", experts],
            ["recipe=linear", experts],
        )
    )

    assert "models.base is still the demo's, pkg://mecha_exp.examples.digits/base.safetensors" in of_any.err
    assert "merges models.base (still the demo's) and 1 of the 2 experts" in of_one.err
    assert "demo" not in of_its_own.err and without.status == 0


def test_each_point_of_a_sweep_has_its_own_folder_in_the_folder_of_outputs(app, models):
    words = ("alpha=0.3,0.5", "evaluator=none", "output.path=merged/", "-m")

    assert app("recipe=ties,weighted_sum", "models.experts=[expert_0_3.safetensors]", *words).status == 0

    made = {path.parent.name for path in (models / "merged").glob("*/model.safetensors")}
    assert made == {f"recipe={r},alpha={a}" for r in ("ties", "weighted_sum") for a in (0.3, 0.5)}


def test_names_of_blocks_may_be_quoted_as_in_json(app, models):
    outcome = app("recipe=weighted_sum", 'blocks={conv1: 0.2, "*head:*": 0.9}', "output=none")

    assert "the pattern '*head:*' matches none" in outcome.err


@pytest.mark.parametrize(
    "word",
    ["evaluator=[{name: x}]", "recipe=[1]", "hydra/launcher=[{a: 1}]", "output=[[a]]", "engine=[]"]
    + [f"{group}={value}" for group in ("recipe", "models") for value in ("null", "1", "true,ties")],
)
def test_a_choice_that_is_no_name_is_answered_with_one(app, models, word):
    outcome = app("recipe=ties", word, "alpha=0.3")

    assert outcome.status == 1 and "expected the name of an option, such as " in outcome.err


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("models.dir=true", "models.dir: expected a text"),
        ("models.cache=[a]", "models.cache: expected a text"),
        ("models.sets={a: [b]}", "models.sets: expected a list"),
        ("tracking.uri=[a]", "tracking.uri: expected a text"),
        ("store={a: 1}", "store: expected a text"),
        ("hub=5", "hub: expected a mapping"),
        ("keys=[1,[2]]", "keys: expected kinds of keys"),
        ("engine.cluster=5", "engine.cluster: expected processes"),
        ("engine.device=99999999999999999999", "engine.device: expected 'cpu'"),
        (
            "evaluator.workers=99999999999999999999",
            "evaluator.workers: expected a number of processes from 0",
        ),
        ("evaluator.race_alpha=[]", "evaluator.race_alpha=[]: expected a probability"),
        ("alpha=" + "[" * 500 + "]" * 500, "too many brackets in each other"),
    ],
)
def test_a_value_of_another_type_is_answered_by_what_is_expected(app, models, word, said):
    outcome = app("recipe=ties", word, "evaluator.name=digits", "output=none")

    assert outcome.status == 1 and said in outcome.err


def test_folders_that_are_named_by_numbers_are_folders(app, models):
    (models / "7").mkdir()
    (models / "base.safetensors").rename(models / "7" / "mine.safetensors")

    outcome = app("recipe=ties", "models.dir=7", "models.base=mine.safetensors", "store=8", "output=none")

    assert outcome.status == 0 and (models / "8").is_dir()


METHOD = """
from torch import Tensor
from mecha_exp import Parameter, Return, merge_method

@merge_method
def {name}(base: Parameter(Tensor), *models: Parameter(Tensor), alpha: float = 1) -> Return(Tensor):
    return base + alpha * sum(model - base for model in models)
"""


def test_a_method_of_the_users_is_a_recipe_by_its_name(app, models, capsys):
    (models / "methods").mkdir()
    (models / "methods" / "found.py").write_text(METHOD.format(name="found_by_itself"))
    (models / "mine.py").write_text(METHOD.format(name="named_by_plugins"))

    sweep = app("recipe=found_by_itself,ties", "alpha=0.3,0.5", "k=0.1,0.2", "output=none", "-m")
    named = app("recipe=named_by_plugins", "plugins=[mine.py]", "alpha=0.3", "output=none")
    info = app("info", "methods", "named_by_plugins", "--plugin", "mine.py", "--recipe")

    assert (sweep.status, named.status, info.status) == (0, 0, 0), sweep.err + named.err + info.err
    assert "[6/6]" in sweep.out and "k: not of found_by_itself" in sweep.out
    assert "method: named_by_plugins" in info.out


def test_merge_block_weights_are_those_of_stable_diffusion(app, models):
    sd1 = app("recipe=weighted_sum", f"blocks=[{','.join(['0.5'] * 26)}]", PLAN)
    sdxl = app("recipe=weighted_sum", f"blocks={','.join(['0.5'] * 20)}", PLAN)

    for outcome in (sd1, sdxl):
        assert "the pattern 'BASE' matches none of the 8 keys" in outcome.err
        assert len(outcome.err) <= 2000 and "and " in outcome.err.splitlines()[-1]
    numbers = list(map(str, range(26)))
    assert block_words("blocks", ",".join(numbers))[::25] == ["++blocks.BASE=0", "++blocks.OUT11=25"]
    assert block_words("blocks", f"[{','.join(numbers[:19])}]")[-1] == "++blocks.OUT08=18"


@pytest.mark.parametrize("name", HARD_NAMES)
def test_a_file_of_any_name_is_typed_with_the_quotes_of_the_shell(app, models, name):
    file = f"{name}.safetensors"
    shutil.copy("base.safetensors", file)

    as_base = app(f"models.base={file}", PLAN)
    as_item = app("recipe=weighted_sum", f"models.experts.0={file}", "models.experts.1=null", PLAN)
    alone = app("recipe=weighted_sum", f"models.experts={file}", PLAN)

    assert as_base.status == 0, as_base.err
    assert alone.status == 0, alone.err
    assert name[:4] in as_base.out and name[:4] in alone.out
    assert "Traceback" not in as_item.err
