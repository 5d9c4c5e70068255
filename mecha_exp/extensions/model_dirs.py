"""Folders where a relative path of a model is looked for, after the current one, by all of this process."""

from mecha_exp.sources.search_path import add_path, get_all, normalize_path

__all__ = ["add_path", "get_all", "normalize_path"]
