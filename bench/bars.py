"""What the engine must reach in a row of the benchmark, and whether it does.

In every row it must not be slower than a peer that does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bar:
    """The bar that a row must reach; None for no requirement.

    Attributes:
        faster: than sd-mecha 1.1.8, so many times at least.
        of_floor: so many times the floor at most.
        megabytes: of resident memory at most.
        copies: a sweep takes at most as long as a point and so many times the copying of its outputs.
        milliseconds: a key, at most.
        seconds: at most, for models of SD1.5's size on two cores.
    """

    faster: float | None = None
    of_floor: float | None = None
    megabytes: int | None = None
    copies: float | None = None
    milliseconds: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Reached:
    """The measured seconds and bytes; None where a value was not measured.

    Attributes:
        seconds: of mecha_exp.
        peak: its resident memory.
        floor: reading every input once and copying the outputs.
        copying: the outputs alone.
        point: of mecha_exp with one of the points of a sweep.
        peers: of others, by name.
        keys: of a model.
    """

    seconds: float
    peak: int
    floor: float
    copying: float = 0.0
    point: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    keys: int = 1


def verdict(bar: Bar, reached: Reached) -> str:
    """Whether a bar is met, and by how much it is missed; `-` where there is nothing to meet."""
    judged = list(_judged(bar, reached))
    missed = [text for text, met in judged if met is False]
    unknown = [text for text, met in judged if met is None]
    words = [f"missed: {', '.join(missed)}"] if missed else ["met"] if len(judged) > len(unknown) else []
    return "; ".join([*words, *(f"not measured: {text}" for text in unknown)]) or "-"


def _judged(bar: Bar, reached: Reached) -> Iterator[tuple[str, bool | None]]:
    """Of each thing that is asked for what was reached in words, and whether that is enough."""
    for name, seconds in reached.peers.items():
        yield f"slower than {name}", reached.seconds <= seconds
    if bar.faster is not None:
        if "sd-mecha" not in reached.peers:
            yield f"{bar.faster:g} times sd-mecha", None
        else:
            times = reached.peers["sd-mecha"] / reached.seconds
            yield f"{times:.1f} of {bar.faster:g} times sd-mecha", times >= bar.faster
    if bar.of_floor is not None:
        share = reached.seconds / reached.floor
        yield f"{share:.2f} instead of {bar.of_floor:g} times the floor", share <= bar.of_floor
    if bar.megabytes is not None:
        megabytes = reached.peak / 1e6
        yield f"{megabytes:.0f} instead of {bar.megabytes} MB", megabytes <= bar.megabytes
    if bar.copies is not None:
        if reached.point is None:
            yield f"one point and {bar.copies:g} times the copying", None
        else:
            most = reached.point + bar.copies * reached.copying
            yield f"{reached.seconds:.2f} instead of {most:.2f} s", reached.seconds <= most
    if bar.milliseconds is not None:
        taken = 1000 * reached.seconds / reached.keys
        yield f"{taken:.2f} instead of {bar.milliseconds:g} ms a key", taken <= bar.milliseconds
    if bar.seconds is not None:
        yield f"{reached.seconds:.1f} instead of {bar.seconds:g} s", reached.seconds <= bar.seconds
