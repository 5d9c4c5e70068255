"""`python -m mecha_exp info methods [NAME]`: the merge methods, and what one of them computes."""

from __future__ import annotations

import argparse
import importlib
import importlib.resources
import inspect
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from rich.markup import escape

from mecha_exp.engine.ir.expansion import expand
from mecha_exp.graph.literals import model
from mecha_exp.graph.nodes import MergeNode, Node, walk
from mecha_exp.inspection.method_recipe import recipe_text
from mecha_exp.method_api.method import Kind, MergeMethod
from mecha_exp.method_api.parameters import ParameterSpec
from mecha_exp.method_api.registry import BUILTIN_METHODS, all_methods, resolve_method
from mecha_exp.terminal import make_table, stdout

STREAMING = {
    "whole": "needs whole tensors",
    "rows": "streams, row by row",
    "reductions": "streams, after reductions",
    "elementwise": "streams",
    "header": "reads headers only",
    "node": "depends on its arguments",
}
"""What a method costs in memory."""


def main(arguments: list[str]) -> int:
    """Print a table of the methods, or all about one."""
    parser = argparse.ArgumentParser(
        prog="python -m mecha_exp info methods",
        description="List the merge methods, or say what one computes, with its parameters and its source.",
        epilog="example: python -m mecha_exp info methods slerp",
    )
    parser.add_argument("name", nargs="?", help="of a method; nothing lists them all")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="as JSON, for other programs")
    shape.add_argument("--markdown", action="store_true", help="the list as in docs/methods.md")
    shape.add_argument("--recipe", action="store_true", help="a recipe file to begin with, for one method")
    options = parser.parse_args(arguments)
    if options.recipe and not options.name:
        parser.error("--recipe needs the NAME of a method")
    chosen = [resolve_method(options.name)] if options.name else all_methods()
    if options.recipe:
        sys.stdout.write(recipe_text(chosen[0]))
        return 0
    described = [describe(method) for method in chosen]
    if options.json:
        sys.stdout.write(json.dumps(described[0] if options.name else described, indent=2) + "\n")
    elif options.markdown:
        sys.stdout.write(markdown(described))
    elif options.name:
        show(described[0])
    else:
        show_all(described)
    return 0


def describe(method: MergeMethod) -> dict[str, Any]:
    """All that is known of a method, in plain values."""
    formula, details, source = _said(method)
    signature = method.signature
    return {
        "name": method.identifier,
        "family": method.__wrapped__.__module__,
        "formula": formula,
        "details": details,
        "source": source,
        "kind": method.kind.value,
        "memory": STREAMING[_how(method)],
        "returns": " or ".join(signature.returned.spaces or ()) or "as its models",
        "parameters": [_parameter(spec) for spec in signature.parameters],
        "example": _example(method),
    }


def _said(method: MergeMethod) -> tuple[str, str, str]:
    """The first line of a docstring, the rest, and what it gives as its source."""
    text = inspect.getdoc(method.__wrapped__) or ""
    text, _, source = text.partition("Source:")
    formula, _, details = text.strip().partition("\n")
    return formula, " ".join(details.split()), " ".join(source.split()).rstrip(".")


def _parameter(spec: ParameterSpec) -> dict[str, Any]:
    plain = spec.required or isinstance(spec.default, float | int | bool | str | None)
    return {
        "name": f"*{spec.name}" if spec.variadic else spec.name,
        "type": _type(spec),
        "default": "" if spec.required else spec.default if plain else str(spec.default),
        "range": _range(spec),
        "meaning": spec.help,
    }


def _type(spec: ParameterSpec) -> str:
    if spec.is_model:
        return " or ".join(spec.spaces) if spec.spaces else "model"
    if spec.interface is list:
        return "number, or one for each model"
    names: dict[Any, str] = {bool: "true or false", int: "whole number", str: "word"}
    return "" if spec.choices else names.get(spec.interface, "number")


def _range(spec: ParameterSpec) -> str:
    if spec.choices:
        return " or ".join(
            choice if isinstance(choice, str) else str(choice).lower() for choice in spec.choices
        )
    bounds = spec.bounds
    given = any(bound is not None for bound in (bounds.ge, bounds.gt, bounds.le, bounds.lt))
    return str(bounds) if given else ""


def _how(method: MergeMethod) -> str:
    """How a method runs; of a composite what the methods do that its defaults make it of."""
    signature = method.signature
    if signature.returned.interface is str:
        return "header"
    count = 0

    def sample(spec: ParameterSpec) -> Node:
        nonlocal count
        count += 1
        return model(f"{count}.safetensors", spec.spaces[0] if spec.spaces else "weight")

    given: dict[str, Any] = {
        spec.name: [sample(spec) for _ in range(3)] if spec.variadic else sample(spec)
        for spec in signature.parameters
        if spec.required and spec.is_model
    }
    node, problems = method.bind(given)
    if problems or node is None:
        return {Kind.REDUCTION: "reductions"}.get(method.kind, "node")
    kinds = {n.method.kind for n in walk(*expand([node])) if isinstance(n, MergeNode)}
    for name, marks in (
        ("whole", {Kind.WHOLE, Kind.FACTOR, Kind.INTERFACE}),
        ("rows", {Kind.ROWWISE}),
        ("reductions", {Kind.REDUCTION}),
    ):
        if kinds & marks:
            return name
    return "elementwise"


def _example(method: MergeMethod) -> str:
    """The command of the method's own recipe, or of one that ends with it, else one that merges by a call."""
    for name, text in sorted(_recipes(), key=lambda recipe: recipe[0] != method.identifier):
        start = "" if name == method.identifier else r"^recipe:\n  "
        if re.search(rf"{start}method: {re.escape(method.identifier)}$", text, re.MULTILINE):
            return f"python -m mecha_exp recipe={name}"
    return f"python -c 'import mecha_exp as m; m.merge({_call(method)}, \"out.safetensors\")'"


def _call(method: MergeMethod) -> str:
    """A recipe in Python that needs the method."""
    models = iter("abcdefgh")
    given: list[str] = []
    for spec in method.signature.parameters:
        if spec.is_model and (spec.required or spec.variadic):
            several = spec.variadic and method.signature.returned.spaces != ("param",)
            names = iter(["base"]) if spec.name == "base" else models
            given += [_model(spec, next(names)) for _ in range(1 + several)]
        elif spec.required:
            given.append(_value(spec))
    call = f"m.{method.identifier}({', '.join(given)})"
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
    """A value for a hyperparameter without a default: the one that its help names, or the first in range."""
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
    """A line for each method, by family."""
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
    """All about one method."""
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
    for title in ("kind", "memory", "returns", "source", "example"):
        if method[title]:
            stdout.print(f"{title:<8} {escape(method[title])}", soft_wrap=True)


def markdown(described: list[dict[str, Any]]) -> str:
    """The built-in methods as tables, a family each, for docs/methods.md."""
    families: dict[str, list[dict[str, Any]]] = {}
    for method in sorted(described, key=lambda d: (d["family"], d["name"])):
        if method["family"].startswith(BUILTIN_METHODS):
            families.setdefault(method["family"], []).append(method)
    lines: list[str] = []
    for family, methods in families.items():
        about = (importlib.import_module(family).__doc__ or "").strip().splitlines()[0]
        lines += [f"### {family.rpartition('.')[2]}", "", about, ""]
        lines += ["| method | what it computes | memory | source |", "| --- | --- | --- | --- |"]
        for m in methods:
            cells = (f"`{m['name']}`", m["formula"], m["memory"], m["source"])
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)
