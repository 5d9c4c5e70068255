"""The process-wide folders of models: relative paths are searched there after the current folder."""

from mecha_exp.sources.search_path import add_path, get_all, normalize_path

__all__ = ["add_path", "get_all", "normalize_path"]
