"""Chooses the adaptive sweep that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mecha_exp.app.adaptive.gradient import learning_of
from mecha_exp.app.adaptive.points import AdaptiveSweep
from mecha_exp.app.adaptive.request import Request
from mecha_exp.app.adaptive.soup import soup_of
from mecha_exp.report.adaptive_records import GRADIENT, GREEDY_SOUP

_MAKERS: Mapping[str, Callable[[Request], AdaptiveSweep]] = {GRADIENT: learning_of, GREEDY_SOUP: soup_of}


def adaptive_sweep(request: Request) -> AdaptiveSweep:
    """The adaptive sweep of its mode.

    Raises:
        ConfigError: anything that is wrong with it; nothing has been written then.
    """
    return _MAKERS[request.config.sweep.mode](request)
