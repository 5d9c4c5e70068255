"""The one door of documents: JSON and YAML are read here, within limits, and held against what they must be.

A dataclass says what a document must be, and its annotations are the schema: `typed` checks types and the
range of numbers, and names a word that the dataclass lacks. Every reader of JSON or YAML is one of these.
"""

from __future__ import annotations

import functools
import json
import re
import stat
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from sys import intern  # thousands of records have the same texts
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from mecha_exp.errors import ConfigError, brief

MAX_BYTES = 100_000_000
"""Bytes of the largest JSON: the largest tokenizers have 35 MB."""
MAX_YAML = 4_000_000
"""Bytes of the largest YAML, which a person or a configuration writes; a byte of it takes 300 of memory."""
MAX_DEPTH = 100
"""Levels of lists and mappings in each other."""
MAX_VALUES = 10_000
"""Values of a YAML text once each alias stands for what it names, or as many as it has bytes."""
MAX_DIGITS = 308
"""Digits of the largest whole number, which is the largest that a float can be."""

T = TypeVar("T")
_SAFE_DEPTH = 2000
"""Levels of YAML that PyYAML takes: a level has a bracket, or a column of its own."""
Sizes = dict[int, tuple[int, int]]
"""By the identity of a node of YAML its values and its height; (0, 0) while it is measured."""

_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_INT, _TEXT, _NULL, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("int", "str", "null", "merge"))


class DocumentError(ConfigError, ValueError):
    """A document that is not what it should be; the message goes after the document's name and a colon."""


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The content of a file, one that does not make its reader wait.

    Raises:
        OSError: it cannot be read.
        DocumentError: it is a pipe or a device, or has more bytes than `limit`.
    """
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise DocumentError("it is a pipe or a device, and no file")
    if status.st_size > limit:
        raise DocumentError(f"it has {status.st_size:,} bytes, and {limit:,} are read")
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """What the JSON in a file says; errors as of `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path))


def parse_json(text: str | bytes | bytearray) -> Any:
    """What JSON says.

    Raises:
        DocumentError: it is not JSON, too deep, has a number that no float can be, or half a character.
    """
    try:
        raw = text.encode() if isinstance(text, str) else text
        if len(raw) > MAX_BYTES:
            raise DocumentError(f"it has {len(raw):,} bytes, and {MAX_BYTES:,} are read")
        parse_int = _integer if _LONG_NUMBER.search(raw) else None
        content = json.loads(raw.decode("utf-8-sig"), parse_int=parse_int)
        if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
            _check_depth(content)
        if _SURROGATE.search(raw):
            json.dumps(content, ensure_ascii=False).encode()
    except DocumentError:
        raise
    except UnicodeEncodeError:
        raise DocumentError("it has half a character, a lone surrogate") from None
    except UnicodeDecodeError as error:
        raise DocumentError(f"it is not UTF-8, at byte {error.start}") from None
    except RecursionError:
        raise DocumentError(_TOO_DEEP) from None
    except ValueError as error:
        raise DocumentError(f"it is not JSON: {error}") from None
    return content


_TOO_DEEP = f"it has more than {MAX_DEPTH} levels of lists and mappings"


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise DocumentError(f"it has a number of {len(digits):,} digits")
    return int(digits)


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(MAX_DEPTH + 1):
        inner = (part.values() if isinstance(part, dict) else part for part in level if part)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise DocumentError(_TOO_DEEP)


def read_yaml(path: Path) -> Any:
    """What the YAML in a file says; errors as of `read_bytes` and `parse_yaml`."""
    return parse_yaml(read_bytes(path, MAX_YAML))


def parse_yaml(text: str | bytes) -> Any:
    """What YAML of one document says.

    Raises:
        DocumentError: it is not YAML, has a name twice in a mapping, or goes beyond a limit of this module.
    """
    documents = parse_yaml_documents(text)
    if len(documents) > 1:
        raise DocumentError(f"it is {len(documents)} documents of YAML, and one is expected")
    return documents[0] if documents else None


def parse_yaml_documents(
    text: str | bytes, as_text: Collection[str] = (), *, without_tags: bool = False
) -> list[Any]:
    """What each document of a YAML text says; errors as of `parse_yaml`.

    Args:
        text: the YAML, as UTF-8 where it is bytes.
        as_text: names whose values are texts, also where they look like numbers.
        without_tags: whether a value with a tag of its own (`!function ...`) is None, and not an error.
    """
    import yaml

    try:
        raw = text if isinstance(text, bytes) else text.encode()
        if len(raw) > MAX_YAML:
            raise DocumentError(f"it has {len(raw):,} bytes, and {MAX_YAML:,} are read")
        kind, text = _loader_class(without_tags), raw.decode("utf-8-sig")
        if raw.count(b"[") + raw.count(b"{") + max(map(len, raw.splitlines()), default=0) > _SAFE_DEPTH:
            _check_depth_of_yaml(yaml.parse(text, kind))
        loader = kind(text)
        try:
            return list(_documents_of(loader, as_text, max(MAX_VALUES, len(raw))))
        finally:
            loader.dispose()
    except DocumentError:
        raise
    except UnicodeError as error:
        raise DocumentError(f"it is not UTF-8: {error}") from None
    except yaml.YAMLError as error:
        raise DocumentError(f"it is not valid YAML: {_described(error)}") from None
    except RecursionError:
        raise DocumentError(_TOO_DEEP) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # of PyYAML, for values that are not what their tags say, such as the date 2001-99-99 or `!!bool x`
        raise DocumentError(f"it is not valid YAML: {type(error).__name__}: {error}") from None


def _check_depth_of_yaml(events: Iterator[Any]) -> None:
    """Check the depth of YAML before its nodes are made: PyYAML in C ends the process where they are deep."""
    depth = 0
    for event in events:
        name = type(event).__name__
        depth += name.endswith("StartEvent") - name.endswith("EndEvent")
        if depth > MAX_DEPTH + 2:  # within a stream and a document
            raise DocumentError(_TOO_DEEP)


def _documents_of(loader: Any, as_text: Collection[str], most: int) -> Iterator[Any]:
    while loader.check_node():
        node = loader.get_node()
        _measure(node, as_text, most, 0, {})
        yield loader.construct_document(node)


@functools.cache
def _loader_class(without_tags: bool) -> Any:
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Reads plain values."""

    if without_tags:
        Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    return Loader


def _measure(node: Any, as_text: Collection[str], most: int, depth: int, known: Sizes) -> tuple[int, int]:
    """The values that a node stands for with all its aliases, `most` at most, and its height in levels."""
    children = node.value
    if isinstance(children, str):
        if node.tag == _INT and len(children) > MAX_DIGITS:
            raise DocumentError(f"it has a number of {len(children):,} digits")
        if "\0" in children:
            raise DocumentError(f"it has a text with a character of code 0: {brief(children)}")
        return 1, 0
    if id(node) in known:
        size, height = known[id(node)]
        if depth + height > MAX_DEPTH or not size:  # not yet measured: it holds itself
            raise DocumentError("it has an alias that holds itself" if not size else _TOO_DEEP)
        return size, height
    if depth >= MAX_DEPTH:
        raise DocumentError(_TOO_DEEP)
    known[id(node)] = 0, 0
    if children and isinstance(children[0], tuple):
        _check_names(children, as_text)
        children = [part for pair in children for part in pair]
    size, height = 1, 0
    for child in children:
        size_of_child, height_of_child = _measure(child, as_text, most, depth + 1, known)
        size, height = size + size_of_child, max(height, height_of_child)
        if size > most:
            raise DocumentError(f"its aliases stand for more than {most:,} values")
    known[id(node)] = size, height + 1
    return known[id(node)]


def _check_names(pairs: Sequence[tuple[Any, Any]], as_text: Collection[str]) -> None:
    """Check that the names of a mapping differ: plain YAML silently takes the last value."""
    seen: set[str] = set()
    for name, value in pairs:
        if not isinstance(name.value, str) or name.tag == _MERGE:
            continue
        if name.value in seen:
            mark = name.start_mark
            raise DocumentError(
                f"it is not valid YAML: line {mark.line + 1}, column {mark.column + 1}: "
                f"{name.value!r} is there twice."
            )
        seen.add(name.value)
        if name.value in as_text and isinstance(value.value, str) and value.tag != _NULL:
            value.tag = _TEXT


def _described(error: Any) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}."


def typed(content: Any, kind: type[T], *, foreign: bool = False) -> T:
    """What a document says as a dataclass, checked by the annotations of its fields.

    Args:
        content: the document, with NaN and infinities as texts where `write_json` wrote it.
        kind: the dataclass, or another type: `Any`, `bool`, `int`, `float`, `str`, and lists, tuples,
            mappings by texts and unions (`X | None`) of these and of dataclasses.
        foreign: whether others write such documents: words that the dataclass lacks are left out then.

    Raises:
        DocumentError: it is not a mapping; a field has another type, or is missing; or there is a word that
            the dataclass lacks, as a newer version of mecha_exp would write it.
    """
    try:
        return cast("T", _reader_of(cast("Hashable", kind), foreign)(content))
    except TypeError as error:
        raise DocumentError(str(error)) from None


def newer(word: object) -> str:
    """What to say of a word that this version does not know in a document that mecha_exp writes."""
    return f"written by a newer mecha_exp: it has the unknown word {brief(word)}. Use that version"


Reader = Callable[[Any], Any]


@functools.cache
def _object_reader(kind: type[T], foreign: bool) -> Callable[[Any], T]:
    hints = get_type_hints(kind)
    readers = {field.name: _reader_of(hints[field.name], foreign) for field in fields(kind)}  # type: ignore[arg-type]
    needed = [
        field.name
        for field in fields(kind)  # type: ignore[arg-type]
        if field.default is MISSING and field.default_factory is MISSING
    ]

    def read(content: Any) -> T:
        if type(content) is not dict:
            raise TypeError(f"expected a mapping, got {brief(content)}")
        if not (foreign or content.keys() <= readers.keys()):
            unknown = next(name for name in content if name not in readers)
            raise TypeError(newer(unknown))
        if missing := next((name for name in needed if name not in content), None):
            raise TypeError(f"it lacks {missing!r}")
        values = {}
        for name, value in content.items():
            if name in readers:
                try:
                    values[name] = readers[name](value)
                except TypeError as error:
                    raise TypeError(f"{name}: {error}") from None
        return kind(**values)

    return read


@functools.cache
def _reader_of(hint: Any, foreign: bool) -> Reader:
    """What turns a value of JSON or YAML into one of a type; it raises a TypeError for any other value."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin in (Union, UnionType):
        kinds = [_reader_of(argument, foreign) for argument in arguments if argument is not NoneType]
        return _union_reader(kinds, NoneType in arguments)
    if origin in (dict, Mapping):
        return _mapping_reader(*(_reader_of(argument, foreign) for argument in arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _tuple_reader([_reader_of(argument, foreign) for argument in arguments])
    if origin in (list, tuple, Sequence):
        return _list_reader(_reader_of(arguments[0], foreign), tuple if origin is tuple else list)
    if is_dataclass(hint):
        return _object_reader(hint, foreign)  # type: ignore[arg-type]
    if hint is float:
        return _float
    return (lambda value: intern(_plain(str, value))) if hint is str else functools.partial(_plain, hint)


def _union_reader(readers: Sequence[Reader], is_optional: bool) -> Reader:
    def read(value: Any) -> Any:
        if value is None and is_optional:
            return None
        faults = []
        for reader in readers:
            try:
                return reader(value)
            except TypeError as error:
                faults.append(str(error))
        raise TypeError(faults[0])

    return read


def _mapping_reader(key: Reader, item: Reader) -> Reader:
    return lambda value: {key(name): item(each) for name, each in _plain(dict, value).items()}


def _list_reader(item: Reader, kind: type) -> Reader:
    return lambda value: kind(map(item, _plain(list, value)))


def _tuple_reader(items: Sequence[Reader]) -> Reader:
    def read(value: Any) -> Any:
        if len(_plain(list, value)) != len(items):
            raise TypeError(f"expected a list of {len(items)}, got {brief(value)}")
        return tuple(item(each) for item, each in zip(items, value, strict=True))

    return read


_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a mapping",
}


def _plain(kind: type, value: Any) -> Any:
    """A value as it is; TypeError for one of another type."""
    if type(value) is not kind:
        raise TypeError(f"expected {_EXPECTED[kind]}, got {brief(value)}")
    return value


def _float(value: Any) -> float:
    """A number of JSON, or one of those that JSON lacks: they are texts, in each field of each file."""
    if type(value) not in (int, float) and value not in ("nan", "inf", "-inf"):
        raise TypeError(f"expected a number, got {brief(value)}")
    try:
        return float(value)
    except OverflowError:
        raise TypeError(f"expected a number, got one of {len(str(value)):,} digits") from None
