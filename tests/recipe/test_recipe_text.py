"""The text form says a recipe in full: read again it is the same graph, whatever its paths hold."""

import contextlib
import math
import re
from textwrap import dedent

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from mecha_exp import (
    Parameter,
    Return,
    add_difference,
    add_difference_ties,
    deserialize,
    literal,
    merge_method,
    model,
    n_average,
    n_model_stock,
    parameter,
    serialize,
    slerp,
    subtract,
    task_arithmetic,
    ties_sum,
    weighted_sum,
)
from mecha_exp.errors import RecipeError
from mecha_exp.graph.by_key import by_key
from mecha_exp.method_api.registry import all_methods

numbers = st.floats(allow_nan=False) | st.integers(-(10**12), 10**12)
finite = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**12), 10**12)
"""What a hyperparameter may be."""
words = st.text(st.characters(exclude_categories=["Cs"]))
paths = words.filter(bool) | st.sampled_from(
    ["a=b.safetensors", 'C:\\new\\"x".safetensors', "&0", "null", "#"]
)
spaces = st.sampled_from(["weight", "delta", "param"])
configs = st.none() | words.filter(lambda name: name not in ("structural", "weight", "delta", "param"))
leaves = (
    st.builds(model, paths)
    | st.builds(model, paths, configs)
    | st.builds(parameter, words.filter(bool), st.sampled_from([None, "weight"]), configs)
)
names = words.filter(lambda w: w not in ("default", "blocks"))
patterns = st.dictionaries(names, numbers, min_size=1, max_size=4)
finite_patterns = st.dictionaries(names, finite, min_size=1, max_size=4)


@st.composite
def strengths(draw):
    """Any value of an unbounded hyperparameter."""
    default = draw(st.none() | finite)
    varied = by_key(draw(finite_patterns) | ({} if default is None else {"default": default}))
    return draw(st.sampled_from([draw(finite), varied]))


def weights(children):
    """Graphs in weight space one node deeper than the given ones."""
    deltas = st.builds(subtract, children, children)
    several = st.lists(children, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda a, b, alpha: weighted_sum(a, b, alpha=alpha), children, children, strengths()),
        st.builds(lambda a, b, alpha: slerp(a, b, alpha=alpha), children, children, strengths()),
        st.builds(lambda a, d, alpha: add_difference(a, d, alpha=alpha), children, deltas, strengths()),
        st.builds(add_difference, children, children, children),
        st.builds(lambda many: n_average(*many), several),
        st.builds(
            lambda base, many, w: task_arithmetic(base, *many, weights=[w] * len(many)),
            children, several, finite,
        ),
        st.builds(
            lambda base, many, k, vote: add_difference_ties(base, *many, k=k, vote_sgn=vote),
            children, several, st.floats(0, 1), st.booleans(),
        ),
    )  # fmt: skip


recipes = st.recursive(leaves, weights, max_leaves=8)


@given(recipes)
def test_a_recipe_that_is_written_and_read_is_the_same_object(recipe):
    text = serialize(recipe)

    assert deserialize(text) is recipe
    assert serialize(deserialize(text)) == text


@given(numbers | words | st.booleans() | st.none() | st.lists(numbers | words | st.booleans() | st.none()))
def test_so_is_a_literal(value):
    for space in ("param", "delta"):
        recipe = literal(value, space)

        assert deserialize(serialize(recipe)) is recipe


@example({"preset": 0.0, "convention": 0.5}, None, None, "param")
@given(patterns, st.none() | numbers, configs, spaces)
def test_so_is_a_value_per_key(per_key, default, config, space):
    recipe = literal(by_key(per_key | ({} if default is None else {"default": default})), config, space)

    assert deserialize(serialize(recipe)) is recipe


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(0.1),
        torch.tensor([[1.5, -0.0, math.inf], [-math.inf, 1e-45, 3.0]]),
        torch.rand(2, 1, 3, dtype=torch.float64),
        torch.tensor([0.1, 65504.0], dtype=torch.float16),
        torch.tensor([0.1, 3e38], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([-(2**62), 7]),
        torch.empty(0, 3),
    ],
)
def test_so_is_a_tensor_to_the_bit(tensor):
    alone, inside = literal(tensor), weighted_sum("a", "b", alpha=tensor.double())

    assert deserialize(serialize(alone)) is alone
    assert deserialize(serialize(inside)) is inside


def test_nan_and_infinity_are_numbers():
    assert math.isnan(deserialize("version 0.1.0\nliteral nan").value)
    assert serialize(literal(-math.inf)).endswith("literal -inf")


def test_a_delta_that_is_a_number_keeps_its_space():
    recipe = add_difference("a", literal(0.1, "delta"))

    assert deserialize(serialize(recipe)) is recipe


def test_the_text_is_lines_that_refer_to_each_other():
    delta = subtract("my model.safetensors", "base")
    recipe = weighted_sum(
        add_difference("base", delta, alpha=0.5),
        add_difference("base", delta),
        alpha={"fc*": 0.3, "a key": 1, "default": 0.7},
    )

    assert serialize(recipe) == dedent("""\
        version 0.1.0
        model "base" model_config=null merge_space="weight"
        model "my model.safetensors" model_config=null merge_space="weight"
        merge "subtract" &1 &0
        merge "add_difference" &0 &2 alpha=0.5
        merge "add_difference" &0 &2
        dict a\\ key=1 fc*=0.3 default=0.7
        merge "weighted_sum" &3 &4 alpha=&5""")


def test_equal_recipes_have_equal_texts():
    one = weighted_sum("a", "b", alpha={"x": 1, "y": 2, "default": 0.5})
    same = weighted_sum("a", "b", alpha={"default": 0.5, "y": 2, "x": 1})

    assert serialize(one) == serialize(same)
    assert serialize(slerp("a", "b", alpha=0.5)) == serialize(slerp("a", "b"))


def test_a_graph_with_much_sharing_has_a_short_text():
    node = model("a")
    for _ in range(40):
        node = n_average(node, node)

    assert serialize(node).count("\n") == 41
    assert deserialize(serialize(node)) is node


def test_a_text_of_any_depth_is_read():
    node = model("a")
    for i in range(3_000):
        node = weighted_sum(node, "b", alpha=i + 0.25)

    assert deserialize(serialize(node)) is node


def test_arguments_after_the_models_are_written_by_name():
    @merge_method
    def weighted(
        base: Parameter(Tensor),
        power: Parameter(float) = 1.0,
        *models: Parameter(Tensor),
        weights: Parameter(list[float]),
    ) -> Return(Tensor):
        return base

    plain, powered = weighted("a", models=["b", "c"], weights=[1, 2]), weighted("a", 2.0, "b", weights=[3])

    assert serialize(plain).endswith('merge "weighted" &0 models=[&1,&2] weights=[1,2]')
    assert deserialize(serialize(plain)) is plain
    assert deserialize(serialize(powered)) is powered


def test_an_in_memory_model_cannot_be_written():
    with pytest.raises(RecipeError, match=r"<in-memory model, 1 key> has no path"):
        serialize(n_average({"w": torch.ones(1)}, "a"))


def test_blank_lines_comments_and_line_ends_of_windows_are_skipped():
    text = (
        'version 0.1.0\r\n\r\n  # what it is for\r\nmodel "a"\r\n'
        '\tmodel   "b" model_config=null\r\n#\r\nmerge "slerp" &0 &1\r\n\r\n'
    )

    assert deserialize(text) is slerp("a", "b")


def test_a_text_may_be_given_as_lines_and_begin_with_blanks_comments_or_a_mark_of_windows():
    lines = ["\ufeff# mine\n", "\n", "version 0.1.0\n", 'model "a"\n', "\n"]

    assert deserialize(lines) is model("a")
    assert deserialize(["\ufeffversion 0.1.0", 'model "a"']) is model("a")


def test_the_end_of_a_long_line_is_shown_where_the_mistake_is():
    line = "dict " + " ".join(f"key{i}={i}" for i in range(500)) + " oops"

    with pytest.raises(RecipeError) as error:
        deserialize(f"version 0.1.0\n{line}")

    _, shown, mark = str(error.value).split("\n")
    assert shown.endswith("key499=499 oops")
    assert len(shown) < 200
    assert mark.index("^") == shown.index("oops")


def test_a_model_keeps_its_config_and_an_unknown_structure_is_none():
    text = 'version 0.1.0\nmodel "a" model_config="sdxl-sgm" merge_space="weight"'

    assert serialize(model("a", "sdxl-sgm")) == text
    assert deserialize(text) is model("a", "sdxl-sgm")
    assert deserialize(text.replace("sdxl-sgm", "structural")) is model("a")


def test_a_parameter_is_a_line():
    template = add_difference(
        parameter("a", config="sdxl-sgm"), parameter("d", "delta"), alpha=parameter("x")
    )

    assert serialize(template) == dedent("""\
        version 0.1.0
        parameter "a" model_config="sdxl-sgm"
        parameter "d" merge_space="delta"
        parameter "x"
        merge "add_difference" &0 &1 alpha=&2""")
    assert deserialize(serialize(template)) is template


def test_the_third_argument_of_add_difference_is_alpha_in_a_text():
    text = 'version 0.1.0\nmodel "a"\nmodel "d" null "delta"\nmerge "add_difference" &0 &1 0.3'

    assert deserialize(text) is add_difference("a", model("d", "delta"), alpha=0.3)


def test_what_sd_mecha_writes_is_read():
    text = dedent("""\
        version 0.1.0
        model "a" model_config=null merge_space="weight"
        model "b" model_config="structural" merge_space="weight"
        merge "subtract" &0 &1
        dict key=0.2
        literal &3 model_config="singleton-mecha" merge_space=null
        merge "convert_singleton" &4
        dict key=true
        literal &6 model_config="singleton-mecha" merge_space="param"
        merge "convert_singleton" &7
        merge "ties_sum" &2 k=&5 vote_sgn=&8
        dict x*=0.3 default=0.5
        literal &10 model_config="structural" merge_space="param"
        merge "add_difference" &0 &9 alpha=&11""")

    delta = ties_sum(subtract("a", "b"), k=0.2, vote_sgn=True)
    assert deserialize(text) is add_difference("a", delta, alpha={"x*": 0.3, "default": 0.5})


def test_what_we_write_for_the_common_methods_is_in_the_words_of_sd_mecha():
    # sd-mecha 1.1.8 reads these very texts
    assert serialize(n_average("a", slerp("a", "b", alpha=0.25))) == dedent("""\
        version 0.1.0
        model "a" model_config=null merge_space="weight"
        model "b" model_config=null merge_space="weight"
        merge "slerp" &0 &1 alpha=0.25
        merge "n_average" &0 &2""")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            'modle "a"',
            "line 3, column 1: unknown command 'modle': expected dict, literal, model, parameter or merge",
        ),
        ("model", "column 1: expected a path in quotes after 'model'"),
        ("model 3", "expected a path in quotes after 'model'"),
        ('model "b', "column 7: a quote or a bracket is not closed"),
        ('model "b" merge_spcae="delta"', "unknown word 'merge_spcae'. Did you mean 'merge_space'?"),
        ('model "b" merge_space="dleta"', "unknown merge space 'dleta'. Did you mean 'delta'?"),
        ("merge", "expected the name of a method in quotes after 'merge'"),
        ("merge slerp &0 &0", "column 7: expected a value, found 'slerp'. Words are written in quotes."),
        ('merge "slrp" &0 &0', "unknown merge method 'slrp'. Did you mean 'slerp'"),
        ('merge "slerp" &0 &1', "column 18: &1 refers to a line that does not come before this one"),
        ('merge "slerp" &0 &-1', "&-1 refers to a line that does not come before this one"),
        ('merge "slerp" &0 &x', "&x refers to a line that does not come before this one"),
        ('merge "slerp" &0', "slerp: b: it has no default and must be given"),
        ('merge "slerp" &0 &0 alpha=0.3 alpha=0.4', "column 31: 'alpha' is given twice"),
        ('merge "slerp" &0 &0 self=1', "slerp: self: there is no such argument."),
        ('merge "slerp" &0 &0 alpha=high', "column 21: expected a value, found 'high'"),
        ("literal", "expected a value after 'literal'"),
        ('literal [1] dtype="flaot32"', "unknown dtype 'flaot32'. Did you mean"),
        ('literal [1,2] dtype="float32" shape=[3]', "shape '[3]' is invalid for input of size 2"),
        ("dict a=[1,2", "column 6: expected a value, found 'a=[1,2'"),
        ("dict", "expected pairs of a key pattern and a value"),
        ("dict 3 4", "expected pairs of a key pattern and a value"),
        ("dict a=[&0]", "column 6: the value of 'a' must be numbers or a word, not another dictionary"),
        ('model "b" "sd1" "weight" 3', "column 1: 1 word too many"),
        ('model "b" null merge_space="weight" model_config=null', "column 37: 'model_config' is given twice"),
        ('model "b" model_config=3', "model_config: expected a word in quotes or null, found 3"),
        ('parameter "x" "dleta"', "unknown merge space 'dleta'. Did you mean 'delta'?"),
        ("parameter x", "column 11: expected a value, found 'x'. Words are written in quotes."),
        ('merge "n_average" models=[&0 &0]', "expected values with commas between them, found [&0 &0]"),
        ('merge "add_difference" &0 &0 0.5 alpha=1', "'alpha' is given twice"),
    ],
)
def test_an_error_says_the_line_the_column_and_the_text(line, said):
    with pytest.raises(RecipeError) as error:
        deserialize(f'version 0.1.0\nmodel "a"\n{line}')

    assert "line 3, column " in str(error.value)
    assert said in str(error.value)
    column = int(re.search(r"column (\d+)", str(error.value))[1])
    assert str(error.value).endswith(f"\n    {line}\n    {' ' * (column - 1)}^")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: expected 'version 0.1.0', found an empty text"),
        ("version 0.2.0", "line 1: expected 'version 0.1.0', found 'version 0.2.0'"),
        ("\n\nversion 0.2.0", "line 3: expected 'version 0.1.0', found 'version 0.2.0'"),
        ("version 0.1.0\n# nothing\n\n", "the recipe has no line after its version"),
    ],
)
def test_a_text_that_is_no_recipe_is_refused(text, said):
    with pytest.raises(RecipeError, match=said):
        deserialize(text)


pieces = st.sampled_from(
    [
        'model "a"', "dict a=1", "literal", 'merge "slerp"', 'merge "n_average"', 'merge "ties_sum"',
        'merge "convert_singleton"', "&0", "&1", "[", "]", "[1,2]", "[&0]", "[[1]]", ",", "=", '"', '"x"',
        "parameter", "dtype=", '"float32"', '"int64"', "shape=", "[-1]", "[99999999999999999999]", "1e999",
        "nan", "null", "models=", "alpha=", 'model_config="structural"', 'model_config="singleton-mecha"',
        "merge_space=", '"delta"', "\\", "\n", "#", "é", "\u2028",
    ]
)  # fmt: skip


@given(st.lists(pieces, max_size=30).map(" ".join))
def test_any_words_of_the_format_are_a_recipe_or_a_recipe_error(text):
    for source in (
        f"version 0.1.0\n{text}",
        f'version 0.1.0\nmodel "a"\nmodel "b"\n{text}',
        f'model "a"\n{text}',
    ):
        with contextlib.suppress(RecipeError):
            deserialize(source)


@given(st.text() | st.lists(st.text('dict merge"[]&=,\\01.#null\n ', max_size=30)).map("\n".join))
def test_any_text_is_a_recipe_or_a_recipe_error(text):
    for source in (
        text,
        f"version 0.1.0\n{text}",
        f'model "a"\n{text}',
        f'version 0.1.0\nmodel "a"\nmerge "slerp" {text}',
    ):
        with contextlib.suppress(RecipeError):
            deserialize(source)


def test_reading_opens_no_file(monkeypatch):
    all_methods()

    def refuse(*args, **kwargs):
        raise AssertionError("a file is opened")

    for name in ("builtins.open", "os.open", "io.open", "os.stat"):
        monkeypatch.setattr(name, refuse)
    recipe = deserialize('version 0.1.0\nmodel "/etc/passwd"\nmodel "nowhere"\nmerge "n_model_stock" &0 &1')
    text = serialize(recipe)
    monkeypatch.undo()

    assert recipe is n_model_stock("/etc/passwd", "nowhere")
    assert "/etc/passwd" in text
