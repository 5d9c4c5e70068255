"""Evaluators: functions from a state dict to numbers or outcomes, found by name.

The names stand in `__init__.pyi` and are loaded when they are first used: to read records takes no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
