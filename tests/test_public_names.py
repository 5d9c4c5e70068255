"""Every public name is there, and says what it is."""

import pytest

import mecha_exp
from mecha_exp.registry import all_methods

METHODS = [m.identifier for m in all_methods() if m.__wrapped__.__module__.startswith("mecha_exp.")]


@pytest.mark.parametrize("name", mecha_exp.__all__)
def test_a_public_name_has_a_docstring_of_its_own(name: str):
    thing = getattr(mecha_exp, name)

    assert thing.__doc__
    assert len(thing.__doc__.split()) >= 4


@pytest.mark.parametrize("name", METHODS)
def test_a_built_in_method_is_a_name_of_the_package(name: str):
    assert getattr(mecha_exp, name).identifier == name


def test_a_name_that_is_none_is_met_with_the_nearest():
    with pytest.raises(AttributeError, match=r"unknown merge method 'slrp'\. Did you mean 'slerp'"):
        mecha_exp.slrp  # noqa: B018


def test_the_lists_of_public_names_agree():
    assert sorted(mecha_exp._HOME) == sorted(mecha_exp.__all__)
