"""The built-in merge methods, one file a family; importing this package registers them all.

They import only what any method may import (docs/writing-a-merge-method.md), so each file is also an example
of how to write a method of your own.
"""

import importlib
import pkgutil

__all__ = [family.name for family in pkgutil.iter_modules(__path__)]

for _family in __all__:
    importlib.import_module(f"{__name__}.{_family}")
