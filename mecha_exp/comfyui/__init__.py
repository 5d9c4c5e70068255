"""Nodes for ComfyUI: models, every merge method, recipes, and merges to MODEL, CLIP and VAE or to a file.

ComfyUI finds them through a folder in its `custom_nodes`, which `python -m mecha_exp comfyui install` writes.
"""

from mecha_exp.comfyui.methods import METHOD_NODES
from mecha_exp.comfyui.nodes import NODES

NODE_CLASS_MAPPINGS = {**NODES, **METHOD_NODES}
"""The class of each node, by the name that workflows keep."""

NODE_DISPLAY_NAME_MAPPINGS = {name: node.TITLE for name, node in NODE_CLASS_MAPPINGS.items()}
"""The title of each node."""

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
