"""Every public name is there, in the stub and in the package."""

import ast
import builtins
from pathlib import Path

import pytest

import mecha_exp
from mecha_exp.method_api.registry import all_methods

METHODS = [m.identifier for m in all_methods() if m.__wrapped__.__module__.startswith("mecha_exp.")]


def test_every_public_name_has_a_docstring():
    assert [name for name in mecha_exp.__all__ if not getattr(mecha_exp, name).__doc__] == []


def test_every_built_in_method_is_a_name_of_the_package():
    assert [getattr(mecha_exp, name).identifier for name in METHODS] == METHODS


def test_no_module_hides_a_public_name():
    """Importing `mecha_exp.NAME` as a module would replace the public object of that name."""
    modules = {path.stem for path in Path(mecha_exp.__file__).parent.iterdir()} - {"extensions"}

    assert modules & set(mecha_exp.__all__) == set()


def test_a_name_that_is_none_is_met_with_the_nearest():
    with pytest.raises(AttributeError, match=r"unknown merge method 'slrp'\. Did you mean 'slerp'"):
        mecha_exp.slrp  # noqa: B018


def test_the_public_names_are_those_that_a_type_checker_sees():
    stub = ast.parse(Path(mecha_exp.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    seen = [alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]

    assert sorted(seen) == sorted(mecha_exp._public_names)


def test_a_star_brings_the_public_names_and_the_methods_as_that_of_sd_mecha_does():
    names: dict[str, object] = {}

    exec("from mecha_exp import *", names)

    assert names["slerp"] is mecha_exp.slerp
    assert names["merge"] is mecha_exp.merge
    assert names["extensions"].merge_methods.resolve("slerp") is mecha_exp.slerp
    assert names["model_dirs"] is mecha_exp.extensions.model_dirs
    assert {*mecha_exp._public_names, *METHODS} <= names.keys()
    assert not {name for name in mecha_exp.__all__ if hasattr(builtins, name)}
