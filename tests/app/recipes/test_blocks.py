"""Strengths by block from the command line: presets, single blocks, gradients."""

import csv

import pytest


def weights(folder) -> dict[str, str]:
    """The value of each block in the table of the one run in a folder."""
    (table,) = folder.rglob("block_values.csv")
    return weights_in(table)


def weights_in(table) -> dict[str, str]:
    """The value of each block in a table."""
    with table.open() as file:
        return {row["block"]: row["value"] for row in csv.DictReader(file)}


def test_a_preset_is_an_option_and_single_blocks_go_over_it(app, folder):
    outcome = app("recipe=weighted_sum", "blocks=GRAD_V", "blocks.fc2=0.3", "output=none")

    assert outcome.status == 0, outcome.err
    found = weights(folder)
    assert (found["conv1"], found["fc2"]) == ("1.0", "0.3")
    [figure] = folder.rglob("block_values.png")
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert float(found["conv2"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("word", ["blocks=GRAD_A,SMOOTHSTEP/2", "blocks=[GRAD_A, SMOOTHSTEP/2]"])
@pytest.mark.usefixtures("figures")
def test_presets_are_swept(app, folder, word):
    outcome = app("recipe=weighted_sum", word, "output=none", "-m")

    assert outcome.status == 0, outcome.err
    assert "GRAD_A" in outcome.out
    assert not list(folder.rglob("block_values.png"))
    assert "SMOOTHSTEP/2" in outcome.out


def test_all_presets_are_a_word(app):
    outcome = app("recipe=weighted_sum", "blocks=all_presets", "output=none")

    assert "RING10_3" in outcome.err
    assert "has several values: add -m" in outcome.err


def test_a_misspelt_preset_is_met_with_the_nearest(app):
    outcome = app("blocks=WRAP21")

    assert outcome.status == 1
    assert "there is no such preset of blocks. Did you mean" in outcome.err
    assert "'WRAP12'" in outcome.err


def test_a_gradient_is_a_list(app, folder):
    outcome = app("recipe=weighted_sum", "alpha=[0.0,0.9]", "output=none")

    assert outcome.status == 0, outcome.err
    found = {block: float(value) for block, value in weights(folder).items()}
    assert found == pytest.approx({"conv1": 0, "conv2": 0.3, "fc1": 0.6, "fc2": 0.9})


@pytest.mark.usefixtures("figures")
def test_a_method_for_some_keys_is_swept_like_a_strength_and_each_block_has_its_table(app, folder):
    outcome = app("recipe=tsv_m", "keys=matrix,all", "output=none", "-m")

    assert outcome.status == 0, outcome.err
    [found] = map(weights_in, folder.rglob("block_values.csv"))
    assert found == {"conv1": "mean", "conv2": "mean", "fc1": "mean tsv_m", "fc2": "mean tsv_m"}
    assert not list(folder.rglob("block_values.png"))


def test_the_plan_counts_the_keys_of_each_policy(app):
    outcome = app("recipe=tsv_m", "keys={vector: base, convolution: mean, default: merge}", "debug=plan")

    assert " keys     4 base, 2 mean, 2 tsv_m" in outcome.out


def test_keys_of_a_kind_that_is_not_one_are_an_error(app):
    outcome = app("recipe=tsv_m", "keys=matrx", "debug=plan")

    assert outcome.status == 1
    assert "Did you mean 'kind:matrix'?" in outcome.err


def test_the_plan_shows_what_each_block_gets(app):
    outcome = app("recipe=weighted_sum", "blocks=FLAT_25", "blocks.fc1=0.75", "debug=plan")

    assert outcome.status == 0, outcome.err
    assert "weighted_sum.alpha" in outcome.out
    assert "0.75" in outcome.out


def test_blocks_of_another_architecture_are_an_error(app):
    outcome = app("blocks.IN04=0.7")

    assert outcome.status == 1
    assert "the pattern 'IN04' matches none of the 8 keys" in outcome.err


def test_a_regular_expression_is_typed_with_backslashes(app, folder):
    outcome = app("recipe=weighted_sum", r"alpha={re\:conv\[12\]: 0.25, default: 0.75}", "output=none")

    assert outcome.status == 0, outcome.err
    found = {block: float(value) for block, value in weights(folder).items()}
    assert found == {"conv1": 0.25, "conv2": 0.25, "fc1": 0.75, "fc2": 0.75}


def test_a_mapping_that_cannot_be_read_says_how_names_are_typed(app):
    outcome = app('alpha={"conv1": 0.25, default: 0.75}')

    assert outcome.status == 1
    assert "names in a mapping are not quoted, and ':', '[' and ']' in them take a backslash" in outcome.err
