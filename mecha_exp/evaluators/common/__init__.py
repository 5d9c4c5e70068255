"""What evaluators of several worlds share: the folders of models, their networks, quiet libraries."""

from mecha_exp.evaluators.common.devices import chosen_device
from mecha_exp.evaluators.common.folders import (
    ModelFolder,
    folder_of,
    frozen_folder,
    model_folder,
    named_folder,
)
from mecha_exp.evaluators.common.libraries import calm, one_line
from mecha_exp.evaluators.common.loading import check_network
from mecha_exp.evaluators.common.networks import check_module, module_network, network

__all__ = [
    "ModelFolder",
    "calm",
    "check_module",
    "check_network",
    "chosen_device",
    "folder_of",
    "frozen_folder",
    "model_folder",
    "module_network",
    "named_folder",
    "network",
    "one_line",
]
