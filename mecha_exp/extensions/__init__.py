"""Extension points: model configs, merge methods, merge spaces, and folders of models."""

from mecha_exp.extensions import merge_methods, merge_spaces, model_configs, model_dirs

__all__ = ["merge_methods", "merge_spaces", "model_configs", "model_dirs"]
