"""Making our launcher and our sweeper known to Hydra.

Hydra takes plugins from the package `hydra_plugins` only and finds them by walking through its folders, which
an editable install does not have. So the package gets a module that is made here and has no file.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from hydra.core.plugins import Plugins

PACKAGE, MODULE = "hydra_plugins", "hydra_plugins.mecha_exp"


def register_with_hydra(jobs: Sequence[Sequence[str]]) -> None:
    """Register what the configuration calls `hydra_plugins.mecha_exp.*`; twice does no harm.

    Args:
        jobs: the overrides of each point, which the sweeper is to run.
    """
    from mecha_exp.app.hydra.launcher import OnePassLauncher
    from mecha_exp.app.hydra.sweeper import LabSweeper

    module = ModuleType(MODULE)
    for plugin in (OnePassLauncher, LabSweeper.of(jobs)):
        plugin.__module__ = MODULE
        setattr(module, plugin.__name__, plugin)
        Plugins.instance().register(plugin)
    sys.modules[MODULE] = module
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError:  # no other plugin is installed
        package = sys.modules[PACKAGE] = ModuleType(PACKAGE)
        package.__path__ = []
    vars(package)["mecha_exp"] = module
