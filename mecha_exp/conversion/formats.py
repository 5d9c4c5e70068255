"""Conversions between formats of one architecture, as merge methods."""

import re
from functools import cache
from typing import Any

from mecha_exp.architectures import Views, is_convertible, resolve, views
from mecha_exp.architectures.views import viewed
from mecha_exp.conversion.lora import adapter_conversion
from mecha_exp.errors import ConfigError
from mecha_exp.method_api.key_map import KeyMapBuilder
from mecha_exp.method_api.method import Kind, MergeMethod
from mecha_exp.method_api.parameters import Parameter, Return
from mecha_exp.method_api.state_dict import StateDict, T

_OF_ADAPTERS = re.compile("convert_'(.+)'_to_base")
_BETWEEN_FORMATS = re.compile("convert[_ ]'(.+)'[_ ]to[_ ]'(.+)'")
_NAMED = {
    "convert_sd1_blocks_to_ldm": ("sd1-supermerger_blocks", "sd1-ldm"),
    "convert_sdxl_blocks_to_sgm": ("sdxl-supermerger_blocks", "sdxl-sgm"),
}
"""Conversions with names of their own in sd-mecha."""


class FormatConversion(MergeMethod):
    """A conversion that only rearranges tensors: each key is a view of other keys; see `architectures.views`.

    A converted model is read as a view, tile by tile. For a converted merge the keys that a view needs are
    computed first.

    Attributes:
        source, target: the identifiers of the model configs.
    """

    def __init__(self, source: str, target: str, table: Views) -> None:
        class by_views:
            """Rows of tensors, one below the other, transposed or of another number of dimensions."""

            @staticmethod
            def map_keys(b: KeyMapBuilder) -> None:
                for key, view in table.by_key.items():
                    b[key] = b.a.keys[view.sources]

            def __call__(
                self,
                a: Parameter(StateDict[T], source),  # type: ignore[valid-type]
                **kwargs: Any,
            ) -> Return(T, target):  # type: ignore[valid-type]
                view = table.by_key[kwargs["key"]]
                return viewed(view, [a[key] for key in view.sources])

        super().__init__(by_views, name_between(source, target), Kind.WHOLE, is_conversion=True)
        self.source = source
        self.target = target


def name_between(source: str, target: str) -> str:
    """The name of the conversion between two formats, as in sd-mecha."""
    return next(
        (n for n, ends in _NAMED.items() if ends == (source, target)), f"convert_'{source}'_to_'{target}'"
    )


def method_named(identifier: str) -> MergeMethod | None:
    """The conversion of a name, or None."""
    if to_base := _OF_ADAPTERS.fullmatch(identifier):
        return adapter_conversion(to_base[1])
    between = _BETWEEN_FORMATS.fullmatch(identifier)
    ends = _NAMED.get(identifier) or (between and (between[1], between[2]))
    return (format_conversion(*ends) or adapter_conversion(*ends)) if ends else None


@cache
def format_conversion(source: str, target: str) -> FormatConversion | None:
    """The conversion between two formats, or None."""
    try:
        ends = resolve(source), resolve(target)
    except ConfigError:
        return None
    if source == target or not is_convertible(*ends):
        return None
    return FormatConversion(source, target, views(*ends))
