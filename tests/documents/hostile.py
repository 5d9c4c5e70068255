"""Hostile documents: valid ones in JSON or YAML with a few parts replaced by what nobody expects."""

import copy
import json
import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Raw:
    """A piece of text that is written as it is."""

    text: str


def bomb(levels: int, names: str = "abcdefghijkl") -> Raw:
    """YAML whose aliases stand for 9 ** levels values."""
    parts = [f"&{names[0]} [{','.join('x' * 9)}]"]
    parts += [f"&{names[n]} [{','.join([f'*{names[n - 1]}'] * 9)}]" for n in range(1, levels)]
    return Raw(f"[{', '.join(parts)}]")


NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 0.5, -0.0, 1e308, 5e-324, 1 << 40, 10**18)
RAW_NUMBERS = ("1" + "0" * 400, "-1" + "0" * 400, "NaN", "Infinity", "-Infinity", "1e400", "-0", "1" * 5000)
TEXTS = (
    *("", " ", "\0", "a\0b", "\x1b[31m", "\r\n", "..", "../../x", "/", ".", "~", "-", "*", "[", "{", "${x}"),
    *("${oc.env:HOME}", "x" * 100_000, "\u202e", "\ufeff", "\u2028", "𝕏" * 50, "nan", "inf", "null", "None"),
    *("1e999", "__class__", "con", "file:///etc/passwd", "https://[::1", "a,b", "!!python/name:os.system"),
    *("(" * 300, "(a+)+$", "|" * 1000, "\\", "%s%n", "{0.__class__}", "0x" + "f" * 400, "é", "𐀀"),
)
RAW_TEXTS = ('"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"\\ud83d\\ude00"')
OTHERS = (None, True, False, [], {}, [[]], [None], {"": None}, [1, "a", None], {"a": {"b": {"c": []}}}, [{}])
DEPTHS = (20, 99, 101, 500, 1000, 5000, 200_000)
YAML_ONLY = (
    *("!!python/object/apply:os.system ['touch PWNED']", "!function os.system", "!!bool x", "!!int ''"),
    *("!!timestamp x", "2001-99-99", "!!float x", "!!binary '%'", "!!set {a, b}", "? [a]\n", "<<", "&a [*a]"),
    *(
        "{<<: *none}",
        "{a: 1, a: 2}",
        "{1: x, null: y, 2001-01-01: z}",
        "190:20:30",
        "0o17",
        "1_000",
        "~",
        "|-",
    ),
    *("{? [a, b] : c}", "{? {a: b} : c}", "!<tag:yaml.org,2002:map> x", "*a", "@", "%TAG", "{<<: [1]}"),
)


def hostile_value(draw: random.Random, is_yaml: bool) -> Any:
    """A value of any kind."""
    kinds: list[Any] = [
        lambda: draw.choice(NUMBERS),
        lambda: Raw(draw.choice(RAW_NUMBERS)),
        lambda: draw.choice(TEXTS),
        lambda: draw.choice(OTHERS),
        lambda: Raw(draw.choice(RAW_TEXTS)),
        lambda: deep(draw),
    ]
    if is_yaml:
        kinds += [lambda: bomb(draw.randint(2, 11)), lambda: Raw(draw.choice(YAML_ONLY))]
    return draw.choice(kinds)()


def deep(draw: random.Random) -> Raw:
    """Lists or mappings in each other."""
    depth = draw.choice(DEPTHS)
    return Raw(draw.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth)))


def mutated(content: Any, draw: random.Random, is_yaml: bool) -> Any:
    """A copy of a document with one part changed."""
    content = copy.deepcopy(content)
    places = list(_places(content))
    if not places or draw.random() < 0.03:
        return hostile_value(draw, is_yaml)
    holder, key = draw.choice(places)
    change = draw.randrange(8)
    if change == 0:
        del holder[key]
    elif change == 1 and isinstance(holder, dict):
        holder[draw.choice(TEXTS)] = holder.pop(key)
    elif change == 2 and isinstance(holder, dict):
        holder[draw.choice(("unknown", "_target_", "hydra", "defaults", "", "a.b", "0"))] = hostile_value(
            draw, is_yaml
        )
    elif change == 3:
        holder[key] = draw.choice(([holder[key]], {"a": holder[key]}, str(holder[key]), [holder[key]] * 3))
    elif change == 4 and len(places) > 1:
        other, at = draw.choice(places)
        holder[key] = copy.deepcopy(other[at])
    else:
        holder[key] = hostile_value(draw, is_yaml)
    return content


def _places(content: Any) -> Any:
    """The places of all values in lists and mappings: the holder and the key."""
    pairs = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, value in pairs:
        yield content, key
        yield from _places(value)


def text_of(content: Any) -> str:
    """JSON, which is YAML too, with pieces of text as they are."""
    if isinstance(content, Raw):
        return content.text
    if isinstance(content, dict):
        return "{" + ", ".join(f"{_text(str(k))}: {text_of(v)}" for k, v in content.items()) + "}"
    if isinstance(content, list | tuple):
        return "[" + ", ".join(map(text_of, content)) + "]"
    return _text(content) if isinstance(content, str) else json.dumps(content)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=len(text) % 2 == 0)


def spoilt(raw: bytes, draw: random.Random) -> bytes:
    """Bytes with a few changed, cut, doubled or put in."""
    for _ in range(draw.randint(1, 3)):
        at, to = sorted(draw.randrange(len(raw) + 1) for _ in range(2))
        piece = draw.choice(
            (b"\xff", b"\0", b"\xc3", b"\xef\xbb\xbf", b"\xff\xfe", b'"', b"{", b"]", b"\n", b"&a *a", b"'")
        )
        change = draw.randrange(5)
        if change == 0:
            raw = raw[:at]
        elif change == 1:
            raw = raw[:at] + piece + raw[at:]
        elif change == 2:
            raw = raw[:at] + raw[min(to, at + 8) :]
        elif change == 3:
            raw = raw[:to] + raw[at:to][:64] + raw[to:]
        else:
            raw = raw[:at] + bytes([draw.randrange(256)]) + raw[at + 1 :]
    return raw


def variant(content: Any, draw: random.Random, is_yaml: bool) -> bytes:
    """The bytes of a hostile document."""
    if isinstance(content, bytes):
        return spoilt(content, draw)
    for _ in range(draw.choice((0, 1, 1, 1, 1, 2, 3))):
        if isinstance(content, dict | list):
            content = mutated(content, draw, is_yaml)
    raw = text_of(content).encode("utf-8", "surrogatepass")
    return spoilt(raw, draw) if draw.random() < 0.1 else raw
