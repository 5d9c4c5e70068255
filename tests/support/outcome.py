"""What a command of the application came to."""

from dataclasses import dataclass


@dataclass
class Outcome:
    """What it printed, and its exit status."""

    status: int
    out: str
    err: str
