"""Evaluators: functions from a state dict to numbers or outcomes, found by name."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
