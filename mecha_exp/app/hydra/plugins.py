"""Makes our launchers and our sweeper known to Hydra.

Hydra takes plugins only from the package `hydra_plugins`, whose folders it walks; an editable install has no
such folder. So the package receives a module that is made here and has no file.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from hydra.core.plugins import Plugins

from mecha_exp.app.hydra.launcher import OnePassLauncher
from mecha_exp.app.hydra.share_launchers import ProcessLauncher, RayLauncher, SlurmLauncher

PACKAGE, MODULE = "hydra_plugins", "hydra_plugins.mecha_exp"


def register_with_hydra() -> None:
    """Register what the configuration calls `hydra_plugins.mecha_exp.*`. Calling it twice does no harm."""
    plugins = (
        Plugins.instance()
    )  # reloads Hydra's own sweeper, so import the class that inherits from it later
    from mecha_exp.app.hydra.sweeper import LabSweeper

    module = ModuleType(MODULE)
    for plugin in (OnePassLauncher, ProcessLauncher, RayLauncher, SlurmLauncher, LabSweeper):
        plugin.__module__ = MODULE
        setattr(module, plugin.__name__, plugin)
        plugins.register(plugin)
    sys.modules[MODULE] = module
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError:  # no other plugin is installed
        package = sys.modules[PACKAGE] = ModuleType(PACKAGE)
        package.__path__ = []
    vars(package)["mecha_exp"] = module
