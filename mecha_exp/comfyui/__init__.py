"""Nodes for ComfyUI: models, every merge method, recipes, and merges to MODEL, CLIP and VAE or to a file.

ComfyUI finds them through a folder in its `custom_nodes`, which `python -m mecha_exp comfyui install` writes.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"mappings": ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]}
)
