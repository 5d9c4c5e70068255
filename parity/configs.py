"""Write what sd-mecha's model configs and conversions say: `python -m parity.configs model_configs.json`.

It runs in the environment of sd-mecha. Of each table a hash is kept, which parity/test_configs.py
compares with the hash of ours: they are equal only where every key, shape and block is.
"""

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

CONVERSIONS = {
    "sd1-supermerger_blocks -> sd1-ldm": ("convert_sd1_blocks", "convert_sd1_blocks_to_ldm"),
    "sdxl-supermerger_blocks -> sdxl-sgm": ("convert_sdxl_blocks", "convert_sdxl_blocks_to_sgm"),
    "sd1-kohya -> sd1-ldm": ("convert_sd1_kohya_to_original", "convert_sd1_kohya_to_original"),
    "sdxl-kohya -> sdxl-sgm": ("convert_sdxl_kohya_to_original", "convert_sdxl_kohya_to_original"),
    "sdxl-diffusers_unet_only -> sdxl-sgm": (
        "convert_sdxl_diffusers_unet_to_original",
        "convert_sdxl_diffusers_unet_to_original",
    ),
}
MODULE = "sd_mecha.extensions.builtin.model_configs"


def main() -> None:
    """Write the hashes."""
    from sd_mecha.extensions import model_configs

    found: dict[str, dict[str, object]] = {"configs": {}, "conversions": {}, "adapters": {}}
    known = {config.identifier: config for config in model_configs.get_all_base()}
    for identifier in sorted(known):
        try:
            keys = known[identifier].keys()
        except Exception as error:  # a config that sd-mecha itself cannot read is no oracle
            sys.stderr.write(f"{identifier}: {error}\n")
            continue
        rows = [f"{key} {list(info.shape or ())}" for key, info in keys.items()]
        found["configs"][identifier] = digest(rows)
    for config in sorted(model_configs.get_all_aux(), key=lambda config: config.identifier):
        found["adapters"][config.identifier] = digest(config.keys())
    for name, (module, method) in CONVERSIONS.items():
        conversion = getattr(importlib.import_module(f"{MODULE}.{module}"), method)
        _, target = name.split(" -> ")
        source_keys = set(known[name.split(" -> ")[0]].keys())
        found["conversions"][name] = digest(
            relation(conversion.__wrapped__.map_keys, source_keys, set(known[target].keys()))
        )
    Path(sys.argv[1]).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def digest(rows: Iterable[str]) -> str:
    """The number of rows and a hash of them, whatever their order."""
    listed = sorted(rows)
    return f"{len(listed)} {hashlib.sha256(chr(10).join(listed).encode()).hexdigest()[:32]}"


def relation(map_keys: Callable[["Builder"], None], sources: set[str], targets: set[str]) -> list[str]:
    """`target: source source` of every key that a conversion makes."""
    builder = Builder(sources)
    map_keys(builder)
    return [f"{key}: {' '.join(made)}" for key, made in builder.made.items() if key in targets]


class Builder:
    """Stands for sd-mecha's own, and writes down what is assigned."""

    def __init__(self, sources: set[str]) -> None:
        self.made: dict[str, tuple[str, ...]] = {}
        self.keys = Known(sources)

    def __setitem__(self, target: str, sources: "Sources") -> None:
        self.made[target] = tuple(sources)


class Known:
    """The keys of the argument; a key that it has not is refused, as sd-mecha's is."""

    def __init__(self, sources: set[str]) -> None:
        self._sources = sources

    def __getitem__(self, names: "str | Iterable[str]") -> "Sources":
        asked = (names,) if isinstance(names, str) else tuple(names)
        if not set(asked) <= self._sources:
            raise ValueError(asked)
        return Sources(asked)


class Sources(tuple[str, ...]):
    """Some keys; what else is said of them does not matter here."""

    __slots__ = ()

    def __matmul__(self, meta: object) -> "Sources":
        return self


if __name__ == "__main__":
    main()
