"""Merge methods as data, as tables and as the page docs/methods.md."""

from __future__ import annotations

import importlib
import importlib.resources
import inspect
import re
from collections.abc import Iterator, Sequence, Set
from typing import Any

from rich.markup import escape

from mecha_exp.engine.ir.expansion import expand
from mecha_exp.graph.literals import model
from mecha_exp.graph.nodes import Node, calls_of
from mecha_exp.method_api.method import STATISTICS, Kind, MergeMethod, Reduction
from mecha_exp.method_api.parameters import ParameterSpec
from mecha_exp.method_api.registry import BUILTIN_METHODS, resolve_method
from mecha_exp.terminal.console import make_table, print_line, stdout

STREAMING = {
    "whole": "needs whole tensors",
    "rows": "streams, row by row",
    "model": "streams, after a trip over all keys",
    "reductions": "streams, after reductions",
    "elementwise": "streams",
    "header": "reads headers only",
    "node": "depends on its arguments",
}
"""The texts about memory, by how a method runs."""

SECTIONS = ("Variants", "Agrees", "Differs", "Source")
"""In a method's docstring: what `variant` chooses, who agrees, how the paper differs, and the source."""

VARIANTS = ("variant", "pairs")
"""The parameters that choose between a paper and its peers."""

_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")


def describe(method: MergeMethod) -> dict[str, Any]:
    """A method as plain data: formula, source, kind, memory, parameters, and an example."""
    formula, details, sections = _docstring_parts(method)
    signature = method.signature
    source = sections["source"].rstrip(".")
    return {
        "name": method.identifier,
        "family": method.__wrapped__.__module__,
        "formula": formula,
        "details": details,
        "source": source,
        "link": ", ".join(f"https://arxiv.org/abs/{number}" for number in _ARXIV.findall(source)),
        "variants": sections["variants"],
        "default": _default_variant(method),
        "agrees": sections["agrees"],
        "differs": sections["differs"],
        "kind": method.kind.value,
        "memory": STREAMING[_streaming(method)],
        "returns": " or ".join(signature.returned.spaces or ()) or "as its models",
        "parameters": [_parameter(spec) for spec in signature.parameters],
        "example": _example(method),
    }


def _docstring_parts(method: MergeMethod) -> tuple[str, str, dict[str, str]]:
    """The first line of the method's docstring, the other lines, and its sections by name."""
    text = inspect.getdoc(method) or ""
    opening, *rest = re.split(rf"(?:^|(?<=\s))({'|'.join(SECTIONS)}): ", text)
    formula, _, details = opening.strip().partition("\n")
    named = {name.lower(): " ".join(words.split()) for name, words in zip(rest[::2], rest[1::2], strict=True)}
    sections = dict.fromkeys(map(str.lower, SECTIONS), "") | named
    return formula, " ".join(details.split()), sections


def _default_variant(method: MergeMethod) -> str:
    """The variant that a call has by default, and that of the recipes that set another one."""
    spec = next((s for s in method.signature.parameters if s.name in VARIANTS), None)
    if spec is None:
        return ""
    words = [f"{spec.name}={spec.default}"]
    for name, text in _recipes():
        chosen = re.search(rf"^{spec.name}: (?!{spec.default}\b)(\S+)", text, re.MULTILINE)
        if chosen and re.search(rf"^  method: {method.identifier}$", text, re.MULTILINE):
            words.append(f"recipe={name}: {chosen.group(1)}")
    return ", ".join(words)


def _parameter(spec: ParameterSpec) -> dict[str, Any]:
    plain = spec.required or isinstance(spec.default, float | int | bool | str | None)
    return {
        "name": f"*{spec.name}" if spec.variadic else spec.name,
        "type": _type(spec),
        "default": "" if spec.required else spec.default if plain else str(spec.default),
        "range": spec.range,
        "meaning": spec.help,
    }


def _type(spec: ParameterSpec) -> str:
    if spec.is_model:
        return " or ".join(spec.spaces) if spec.spaces else "model"
    if spec.name == STATISTICS:
        return "statistics(...)"
    if spec.interface is list:
        return "number, or one for each model"
    names: dict[Any, str] = {bool: "true or false", int: "whole number", str: "word"}
    return "" if spec.choices else names.get(spec.interface, "number")


def _streaming(method: MergeMethod) -> str:
    """How a method runs, a key of `STREAMING`; a composite runs like the methods that it calls by default."""
    signature = method.signature
    if signature.returned.interface is str:
        return "header"
    count = 0

    def sample(spec: ParameterSpec) -> Node:
        nonlocal count
        count += 1
        return model(f"{count}.safetensors", spec.spaces[0] if spec.spaces else "weight")

    arguments: dict[str, Any] = {
        spec.name: [sample(spec) for _ in range(3)] if spec.variadic else sample(spec)
        for spec in signature.parameters
        if spec.required and spec.is_model
    }
    if method.statistics is not None:
        files = [model(f"{number}.stats.safetensors") for number in range(3)]
        arguments[STATISTICS] = resolve_method(STATISTICS)(*files, kind=method.statistics)
    node, problems = method.bind(arguments)
    if problems or node is None:
        return _streaming_of({method}) if method.kind is Kind.REDUCTION else "node"
    return _streaming_of({call.method for call in calls_of(*expand([node]))})


def _streaming_of(methods: Set[MergeMethod]) -> str:
    """How the methods that are called run together."""
    kinds = {method.kind for method in methods}
    if kinds & {Kind.WHOLE, Kind.FACTOR, Kind.INTERFACE}:
        return "whole"
    if Kind.ROWWISE in kinds:
        return "rows"
    if any(isinstance(method, Reduction) and method.of_model for method in methods):
        return "model"
    return "reductions" if Kind.REDUCTION in kinds else "elementwise"


def _example(method: MergeMethod) -> str:
    """A command that uses the method: its own recipe, another recipe, or else a call in Python."""
    if method.title:
        return f"python -m mecha_exp recipe={method.identifier}"
    for name, text in sorted(_recipes(), key=lambda recipe: recipe[0] != method.identifier):
        start = "" if name == method.identifier else r"^recipe:\n  "
        if re.search(rf"{start}method: {re.escape(method.identifier)}$", text, re.MULTILINE):
            return f"python -m mecha_exp recipe={name}"
    return f"python -c 'import mecha_exp as m; m.merge({_call(method)}, \"out.safetensors\")'"


def _call(method: MergeMethod) -> str:
    """A recipe in Python that calls the method."""
    models = iter("abcdefgh")
    arguments: list[str] = []
    for spec in method.signature.parameters:
        if spec.is_model and (spec.required or spec.variadic):
            several = spec.variadic and method.signature.returned.spaces != ("param",)
            is_base = spec.name == "base" and spec.spaces != ("delta",)  # which is a difference to a base
            names = iter(["base"]) if is_base else models
            arguments += [_model(spec, next(names)) for _ in range(1 + several)]
        elif spec.required:
            arguments.append(_value(spec))
    call = f"m.{method.identifier}({', '.join(arguments)})"
    if method.signature.returned.interface is str:
        word = "dtype" if "dtype" in method.identifier else "device"
        return f'm.model("a.safetensors").to({word}={call})'
    if method.kind is Kind.FACTOR:
        return f"m.my_own_method({call})"
    if method.signature.returned.spaces == ("param",):
        return f'm.weighted_sum("a.safetensors", "b.safetensors", alpha={call})'
    return f'"base.safetensors" + {call}' if method.signature.returned.spaces == ("delta",) else call


def _model(spec: ParameterSpec, name: str) -> str:
    path = f'"{name}.safetensors"'
    return f'm.subtract({path}, "base.safetensors")' if spec.spaces == ("delta",) else path


def _value(spec: ParameterSpec) -> str:
    """A value for a hyperparameter without a default: from its help, or else the first one in range."""
    named = re.search("such as `(.+?)`", spec.help)
    if spec.interface is str:
        return f'"{named.group(1) if named else spec.name}"'
    return next(str(value) for value in (0.5, 0, 1) if spec.check(value) is None)


def _recipes() -> Iterator[tuple[str, str]]:
    folder = importlib.resources.files("mecha_exp.conf") / "recipe"
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            yield file.name.removesuffix(".yaml"), file.read_text(encoding="utf-8")


def show_all(described: list[dict[str, Any]]) -> None:
    """Print a line for each method, by family."""
    table = make_table("method", "what it computes", "memory")
    family = None
    for method in sorted(described, key=lambda d: (d["family"], d["name"])):
        if family not in (None, method["family"]):
            table.add_section()
        family = method["family"]
        table.add_row(method["name"], escape(method["formula"]), method["memory"])
    stdout.print(table)
    stdout.print(f"{len(described)} methods; `python -m mecha_exp info methods NAME` tells more of one.")


def show(method: dict[str, Any]) -> None:
    """Print everything about one method."""
    stdout.print(f"[bold]{method['name']}[/]  {escape(method['formula'])}")
    if method["details"]:
        stdout.print(escape(method["details"]))
    table = make_table("parameter", "type", "default", "range", "meaning")
    for spec in method["parameters"]:
        default = spec["default"]
        shown = (
            "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        )
        table.add_row(
            *(escape(str(v)) for v in (spec["name"], spec["type"], shown, spec["range"], spec["meaning"]))
        )
    stdout.print(table)
    titles = (
        "kind",
        "memory",
        "returns",
        "source",
        "link",
        "default",
        "variants",
        "agrees",
        "differs",
        "example",
    )
    for title in titles:
        if method[title]:
            print_line(f"{title:<8} {method[title]}")


def markdown(described: list[dict[str, Any]]) -> str:
    """The built-in methods as Markdown for docs/methods.md: those of papers, then a table for each family."""
    families: dict[str, list[dict[str, Any]]] = {}
    for method in sorted(described, key=lambda d: (d["family"], d["name"])):
        if method["family"].startswith(BUILTIN_METHODS):
            families.setdefault(method["family"], []).append(method)
    compared = [m for methods in families.values() for m in methods if m["agrees"] or m["differs"]]
    lines = [
        "### papers and peers",
        "",
        "Whose each method is, what is chosen by default, and what its paper has otherwise.",
        "",
    ]
    lines += _table(
        ("method", "source", "default", "variants", "agrees with", "differs"),
        [
            (
                f"`{m['name']}`",
                _linked(m["source"]),
                *(m[c] for c in ("default", "variants", "agrees", "differs")),
            )
            for m in compared
        ],
    )
    for family, methods in families.items():
        about = (importlib.import_module(family).__doc__ or "").strip().splitlines()[0]
        lines += [f"### {family.rpartition('.')[2]}", "", about, ""]
        rows = [(f"`{m['name']}`", m["formula"], m["memory"], _linked(m["source"])) for m in methods]
        lines += _table(("method", "what it computes", "memory", "source"), rows)
    return "\n".join(lines)


def _table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(titles)} |", f"| {' | '.join(['---'] * len(titles))} |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [*lines, ""]


def _linked(source: str) -> str:
    return _ARXIV.sub(lambda match: f"[{match[0]}](https://arxiv.org/abs/{match[1]})", source)
