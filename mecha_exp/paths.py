"""The default places of outputs, once."""

from __future__ import annotations

from pathlib import Path

OUTPUTS = Path("outputs")
