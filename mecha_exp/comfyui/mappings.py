"""The nodes in the two mappings that ComfyUI reads."""

from mecha_exp.comfyui.methods import METHOD_NODES
from mecha_exp.comfyui.nodes import NODES

NODE_CLASS_MAPPINGS = {**NODES, **METHOD_NODES}
"""The class of each node, by the name that workflows keep."""

NODE_DISPLAY_NAME_MAPPINGS = {name: node.TITLE for name, node in NODE_CLASS_MAPPINGS.items()}
"""The title of each node."""
