"""Model cards: what a merged model was made of, how, and under which licences, as README.md of its folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from mecha_exp.cards import Settings
from mecha_exp.checkpoint.folder import PIPELINE
from mecha_exp.checkpoint.sidecars import CARD_TAG
from mecha_exp.engine import EngineOptions
from mecha_exp.engine.options import SETTINGS
from mecha_exp.engine.planner.by_key import output_dtype_words
from mecha_exp.engine.provenance import settings_of, versions
from mecha_exp.errors import brief
from mecha_exp.families import CONFIG
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import InMemory, LiteralNode, MergeNode, Node, calls_of, models_of
from mecha_exp.mergekit.writer import to_mergekit
from mecha_exp.publishing.inputs import Input, inputs_of
from mecha_exp.publishing.licences import Licence
from mecha_exp.recipe.text import serialize
from mecha_exp.system.texts import markdown_block, markdown_code, markdown_table, markdown_text

SHOWN_CALLS = 12
"""The calls of a recipe that are listed; its text has all."""
SHOWN_NAMES = 3
"""The inputs that the title names."""


def model_card(recipe: Node, settings: Settings) -> bytes:
    """The card of a merged model: Markdown with the front matter that hubs read, in UTF-8.

    It has the method with its hyperparameters, the inputs with the SHA-256 of their contents and their
    licences, and the recipe: as a configuration of mergekit where that means the same, or else as text.
    Nothing in it depends on the time, so that the same merge has the same card.

    Args:
        recipe: its graph.
        settings: of the merge.

    Raises:
        CheckpointError: an input does not exist or cannot be read.
    """
    calls = calls_of(recipe)[::-1]
    calls.sort(key=lambda call: call.method.identifier == "cast")  # what rounds the result comes last
    inputs = inputs_of(recipe, settings.options.model_dirs, settings.contents)
    front_matter = yaml.safe_dump(_front_matter(inputs), sort_keys=False, allow_unicode=True)
    sections = [
        f"---\n{front_matter}---\n",
        f"# Merge of {_names([markdown_text(each.name) for each in inputs])}{_by_method(calls)}\n",
        "\n".join(_method_lines(calls)),
        "\n".join(_input_lines(inputs)),
        "\n".join(_recipe_lines(recipe, settings)),
        "\n".join(_setting_lines(settings)),
    ]
    return "\n".join(sections).encode(errors="backslashreplace")


def _front_matter(inputs: Sequence[Input]) -> dict[str, Any]:
    """The entries by which a hub finds and links a model."""
    entries: dict[str, Any] = {}
    if repositories := sorted({each.repository for each in inputs if each.repository}):
        entries |= {"base_model": repositories, "base_model_relation": "merge"}
    folder = inputs[0].folder if inputs else None
    if folder and (folder / PIPELINE).is_file():
        entries["library_name"] = "diffusers"
    elif folder and (folder / CONFIG).is_file():
        entries["library_name"] = "transformers"
    if licence := _common_licence(inputs):
        entries |= licence.front_matter
    return {**entries, "tags": ["merge", CARD_TAG]}


def _common_licence(inputs: Sequence[Input]) -> Licence | None:
    """The licence that all inputs have; None where one has another, or none that is known."""
    licences = {each.licence for each in inputs}
    licence = licences.pop() if len(licences) == 1 else None
    return licence if licence and licence.word else None


def _by_method(calls: Sequence[MergeNode]) -> str:
    """The words of the title for the method that papers name, or for the only one."""
    names = [call.method.title for call in calls if call.method.title]
    names += [call.method.identifier for call in calls] if len(calls) == 1 else []
    return f" by {markdown_text(names[0])}" if names else ""


def _method_lines(calls: Sequence[MergeNode]) -> Iterator[str]:
    yield "## Method\n"
    if not calls:
        yield "One model, unchanged.\n"
        return
    about = (calls[0].method.__doc__ or "").strip().partition("\n")[0]
    yield f"{markdown_code(calls[0].method.identifier)}: {markdown_text(about)}\n"
    shown = calls[:SHOWN_CALLS]
    rows = [[markdown_code(c.method.identifier), markdown_text(_hyperparameters(c))] for c in shown]
    more = [["...", f"{len(calls) - SHOWN_CALLS} more in the recipe"]] if len(calls) > SHOWN_CALLS else []
    yield markdown_table([["call", "hyperparameters"], *rows, *more]) + "\n"


def _hyperparameters(call: MergeNode) -> str:
    """The values of a call, those that are the defaults too."""
    arguments = dict(call.arguments)
    words = []
    for spec in call.method.signature.parameters:
        argument = arguments.get(spec.name)
        if isinstance(argument, LiteralNode):
            value = argument.value
            words.append(f"{spec.name} = {brief(dict(value.words) if isinstance(value, ByKey) else value)}")
        elif argument is None and not spec.required and spec.default is not None:
            words.append(f"{spec.name} = {brief(spec.default)}")
    return ", ".join(words)


def _input_lines(inputs: Sequence[Input]) -> Iterator[str]:
    yield "## Inputs\n"
    rows = [["model", "licence", "SHA-256 of its content"]]
    for each in inputs:
        name = markdown_text(each.name) + (f" at {markdown_code(each.commit)}" if each.commit else "")
        licence = markdown_text(each.licence or "unknown")
        rows.append([name, licence, markdown_code(each.sha256 or "not known")])
    yield markdown_table(rows) + "\n"
    unknown = [markdown_text(each.name) for each in inputs if each.licence is None or not each.licence.word]
    licences = {markdown_text(each.licence) for each in inputs if each.licence}
    if unknown:
        yield f"The licence of {_names(unknown)} is not known from a card beside the weights.\n"
    if len(licences) > 1:
        yield (
            f"The inputs have different licences ({', '.join(sorted(licences))}), so this card names none. "
            "Who publishes the model keeps to all of them.\n"
        )


def _recipe_lines(recipe: Node, settings: Settings) -> Iterator[str]:
    yield "## Recipe\n"
    config = settings.config or to_mergekit(recipe, settings.dtype, settings.options.model_dirs)
    if config is not None:
        yield "As a configuration of mergekit, for `python -m mecha_exp merge CONFIG.yml OUTPUT` too:\n"
        yield markdown_block(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True), "yaml")
    elif any(isinstance(model.source, InMemory) for model in models_of(recipe)):
        yield "It reads models in memory, which have no path that a text could name.\n"
    else:
        yield "For `python -m mecha_exp merge RECIPE.mecha -o OUTPUT`:\n"
        yield markdown_block(serialize(recipe), "text")


def _setting_lines(settings: Settings) -> Iterator[str]:
    """The settings that are not the defaults, and the versions of what computes."""
    defaults, own = settings_of(EngineOptions()), settings_of(settings.options)
    changed = {f"engine.{name}": own[name] for name in SETTINGS if own[name] != defaults[name]}
    if settings.dtype is not None:
        changed["output.dtype"] = str(output_dtype_words(settings.dtype))
    yield "## Settings\n"
    words = [markdown_code(f"{name}={value}") for name, value in changed.items()]
    yield f"{', '.join(words) if words else 'The defaults'}.\n"
    made_with = ", ".join(f"{package} {version}" for package, version in versions().items())
    yield f"Made with {made_with}.\n"


def _names(names: Sequence[str]) -> str:
    listed = list(dict.fromkeys(names))
    if len(listed) > SHOWN_NAMES:
        return f"{', '.join(listed[:SHOWN_NAMES])} and {len(listed) - SHOWN_NAMES} more"
    return " and ".join(filter(None, [", ".join(listed[:-1]), *listed[-1:]]))
