"""Reads and writes state dicts: files, shards and folders, in parts, checked and atomic."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
