"""Inputs that stay on a GPU between the passes over a key, so that they are read and copied there once."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import TypeAlias

import torch

from mecha_exp.engine.devices import free_bytes

Place: TypeAlias = tuple[object, ...]
"""A name for the values of a tile: the input, and the range."""

SHARE = 0.5
"""The share of a GPU's free memory that inputs may take."""


class Residence:
    """Tiles of inputs on a device, by key; once the room for them is full, no more are kept.

    Args:
        device: where the tiles lie.
    """

    def __init__(self, device: str) -> None:
        self._lock = threading.Lock()
        self._room = int(free_bytes(device) * SHARE)
        self._tiles: dict[Hashable, dict[Place, torch.Tensor]] = {}

    def of(self, key: Hashable) -> Mapping[Place, torch.Tensor]:
        """The tiles of a key, as they are now."""
        with self._lock:
            return dict(self._tiles.get(key, {}))

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes could be kept now."""
        with self._lock:
            return nbytes <= self._room

    def keep(self, key: Hashable, place: Place, tile: torch.Tensor) -> None:
        """Keep a tile that has arrived, if there is room."""
        with self._lock:
            tiles = self._tiles.setdefault(key, {})
            if tile.nbytes <= self._room and place not in tiles:
                tiles[place] = tile
                self._room -= tile.nbytes

    def drop(self, key: Hashable) -> None:
        """Make room: the tiles of a key are needed no more."""
        with self._lock:
            self._room += sum(tile.nbytes for tile in self._tiles.pop(key, {}).values())
