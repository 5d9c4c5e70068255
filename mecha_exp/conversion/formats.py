"""Conversions between formats of one architecture, as merge methods."""

import re
from functools import cache, partial
from typing import Any

from mecha_exp.architectures import Views, is_convertible, member_of, resolve, views
from mecha_exp.architectures.views import viewed
from mecha_exp.conversion.lora import AdapterConversion, adapter_conversion
from mecha_exp.errors import ConfigError
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node
from mecha_exp.method_api.key_map import KeyMapBuilder
from mecha_exp.method_api.method import Kind, MergeMethod
from mecha_exp.method_api.parameters import Parameter, Return
from mecha_exp.method_api.state_dict import StateDict, T
from mecha_exp.method_api.views import ModelView, Reading, View
from mecha_exp.sources.format_view import ConvertedSource, convert_source
from mecha_exp.sources.source import Source

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

    def read(self, call: MergeNode, asked: MergeNode, reading: Reading) -> View | Node:
        """A view of a model, or of a LoRA file as differences in this format; of a merge the call itself."""
        (model,) = call.children
        below = model.call if isinstance(model, ModelView) else model
        if isinstance(below, MergeNode) and isinstance(below.method, AdapterConversion):
            config = below.method.deltas.config
            direct = adapter_conversion(config, member_of(resolve(self.target), config.base))
            if direct is not None:  # one conversion instead of two in a row
                call = MergeNode(direct, (("lora", below.children[0]),), below.space)
                return direct.read(call, call, reading)
        if isinstance(model, ModelNode):
            return View(call, partial(self._open, model, reading.sources[model]))
        reading.configs.require_known_keys(model, self.source)
        return call

    def _open(self, model: ModelNode, source: Source) -> Source:
        if model.config is None:
            return convert_source(source, self.target)
        declared = resolve(model.config)  # the file may be only a part of a model
        names = {key: alias for alias, key in declared.aliases().items() if alias in source}
        return ConvertedSource(source, views(declared, self.target).named(names))


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
