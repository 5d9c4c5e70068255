"""mecha_exp: the lab bench for model-merge ablations, and the merge engine behind it.

The public names stand in `__init__.pyi`. They are loaded when they are first used, so that importing the
package, and asking the command line for help, costs next to nothing. A built-in merge method is an attribute
too: `mecha_exp.slerp`; and `from mecha_exp import *` brings all of them.
"""

import sys

if sys.argv[:1] == ["-m"] and "mecha_exp" in sys.orig_argv:  # the command line, whose imports take a while
    from mecha_exp.system.imports import leave_on_interrupt, require_packages

    leave_on_interrupt()
    require_packages("lazy_loader")

import pathlib
from typing import Any

import lazy_loader

from mecha_exp._version import __version__ as __version__

# In a checkout conf/, methods/ and examples/ lie beside this package and belong to it, installed or not.
_checkout = pathlib.Path(__file__).parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "conf").is_dir():
    __path__.append(str(_checkout))

_load, _, _public_names = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _all()
    if name in _public_names:
        return _load(name)
    if name.startswith("_"):
        raise AttributeError(f"module 'mecha_exp' has no attribute '{name}'")
    from mecha_exp.errors import RecipeError
    from mecha_exp.method_api.registry import resolve_method

    try:
        return resolve_method(name)
    except RecipeError as error:
        raise AttributeError(f"module 'mecha_exp' has no attribute '{name}': {error}") from None


def __dir__() -> list[str]:
    return _all()


def _all() -> list[str]:
    """What `from mecha_exp import *` brings: the public names and every built-in merge method."""
    from mecha_exp.method_api.registry import BUILTIN_METHODS, all_methods

    methods = [x.identifier for x in all_methods() if x.__wrapped__.__module__.startswith(BUILTIN_METHODS)]
    return sorted({*_public_names, *methods})
