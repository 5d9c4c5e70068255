"""Quotes of the shell and of Hydra, `~` in paths, and the explanation of a word that cannot be parsed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException

from mecha_exp.errors import brief

_HOME = re.compile(r"""(?:^|(?<=[\[,'" ]))~(?=/|$|[\],])""")
_NOT_PLAIN = re.compile(r"[^\w./:@%+*?|-]", re.ASCII)
_EXTRANEOUS = re.compile(r"^\w+ input '(?P<text>.+?)'(?: expecting|$)", re.DOTALL | re.MULTILINE)
_NO_ALTERNATIVE = re.compile(r"at input '(?P<text>.+?)'$", re.DOTALL | re.MULTILINE)
_CALL = re.compile(r"([A-Za-z_]\w*)\(.*\)")
_LEXER = "LexerNoViableAltException: "
KEY = re.compile(r"[A-Za-z_][\w$-]*(\.[\w$-]+)*", re.ASCII)
"""A key as Hydra reads it."""
_NAME = re.compile(r"[+~]{0,2}[A-Za-z_][\w.$/@-]*", re.ASCII)
TOO_DEEP = "it has too many brackets in each other"

_MAX_SHOWN = 300


def shell_word(word: str) -> str:
    """A word as it is typed in bash and zsh.

    >>> shell_word("alpha=0.3"), shell_word("models.experts=[a.st,b.st]")
    ('alpha=0.3', "'models.experts=[a.st,b.st]'")
    >>> shell_word("models.base='/m/dream shaper (v8).st'")
    '"models.base=\\'/m/dream shaper (v8).st\\'"'
    """
    if re.fullmatch(r"[\w./:=,+%@-]+", word):
        return word
    if "'" in word and "!" not in word:
        return '"' + re.sub(r'(["$`\\])', r"\\\1", word) + '"'
    return shlex.quote(word)


def quoted(text: str) -> str:
    """A text as a value that Hydra takes as it is, in quotes where it needs them.

    >>> quoted("a.safetensors"), quoted("[Lah] it's.safetensors")
    ('a.safetensors', '"[Lah] it\\'s.safetensors"')
    """
    is_plain = text and not _NOT_PLAIN.search(text) and _parsed(f"x={text}", str) == text
    quote = Quote.double if "'" in text else Quote.single
    return text if is_plain else QuotedString(text, quote).with_quotes()


def with_home(value: str) -> str:
    """A value with the home folder for each `~` that begins a path."""
    if "~" not in value:
        return value
    home = str(Path.home())
    escaped = re.sub(r"([ ()\[\]{}:=,\\])", r"\\\1", home)
    return _HOME.sub(lambda match: home if _within_quotes(value, match.start()) else escaped, value)


def split(value: str) -> list[str]:
    """The parts of a value between its commas, those in brackets and quotes left whole.

    >>> split("a,[b,c],'d,e'")
    ['a', '[b,c]', "'d,e'"]
    """
    parts, depth, quote = [""], 0, ""
    for index, character in enumerate(value):
        if quote:
            quote = "" if character == quote and value[index - 1] != "\\" else quote
        elif character in "'\"":
            quote = character
        depth += 0 if quote else (character in "[{(") - (character in "]})")
        if character == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def parse(word: str) -> Override | None:
    """An override; None if Hydra cannot parse the word."""
    try:
        return OverridesParser.create().parse_overrides([word])[0]
    except (OverrideParseException, RecursionError):
        return None
    except HydraException:  # `glob` needs the configuration, and is parsed when there is one
        return None


def explain(error: OverrideParseException) -> str:
    """A message for a word that Hydra cannot parse: where it stops, and the word that it could be."""
    word = str(error.override)
    if error.message == TOO_DEEP:
        return f"{brief(word)} cannot be read: {TOO_DEEP}."
    key, equals, value = word.partition("=")
    shown = word.lstrip("+")
    place = _place(error, word) - (len(word) - len(shown))
    message = f"{brief(shown)} cannot be read"
    if "\n" not in shown and 0 <= place <= len(shown) <= _MAX_SHOWN:
        message += f" from the character that is marked.\n    {shown}\n    {' ' * place}^"
    else:
        message += "."
    if not equals or not _NAME.fullmatch(key):
        return f"{message}\nBefore the '=' stands the name of a key, such as alpha or models.base."
    if function := _CALL.fullmatch(value.strip()):
        return (
            f"{message}\nNo function of such values is called '{function[1]}'. They are drawn by "
            "interval(0,1), range(1,9,2), int(interval(1,8)) or tag(log,interval(0.01,1)), and a value for "
            "each expert by 'weights.*=interval(0,1)'."
        )
    corrected = next((w for w in _corrections(key, value) if w is not None), None)
    if corrected and len(corrected) <= _MAX_SHOWN:
        message += f"\nType: {shell_word(corrected)}"
    if "{" in value:
        message += "\nThe names in a mapping are not quoted, and ':', '[' and ']' in them take a backslash."
    return message


def _corrections(key: str, value: str) -> list[str | None]:
    """Words that Hydra parses, the likeliest first: a list with each value in quotes, the whole in quotes."""
    inner = value.strip().lstrip("=")
    candidates: list[str] = []
    if inner.startswith("{"):
        return []
    if inner.startswith("[") and (inner.endswith("]") or "]" not in inner):
        bare = inner[1:].removesuffix("]").strip(" ,")
        parts = [part.strip().strip("'\"") for part in split(bare)]
        candidates.append(f"{key.lstrip('+')}=[{','.join(map(quoted, parts))}]")
    elif trimmed := inner.strip("\"', "):
        is_list = re.fullmatch(r"[\w.+, -]+", trimmed)  # of numbers or names, with a comma too many
        text = ",".join(filter(None, map(str.strip, trimmed.split(",")))) if is_list else quoted(trimmed)
        candidates.append(f"{key.lstrip('+')}={text}")
    return [word for word in candidates if parse(word) is not None]


def _place(error: OverrideParseException, word: str) -> int:
    """The index of the character at which Hydra stopped; -1 if it does not say."""
    text = str(error.message)
    if text.startswith(_LEXER):  # the second line is a caret below the word
        return text.partition("\n")[2].partition("\n")[0].find("^") - len(_LEXER)
    if match := _NO_ALTERNATIVE.search(text):
        start = word.find(match["text"])
        return start if start < 0 else start + len(match["text"]) - 1
    match = _EXTRANEOUS.search(text)
    return word.find(match["text"], word.find("=") + 1) if match else -1


def _within_quotes(value: str, index: int) -> bool:
    before = value[:index]
    return before.count("'") % 2 == 1 or before.count('"') % 2 == 1


def _parsed(word: str, kind: type) -> object:
    override = parse(word)
    if override is None or override.is_sweep_override():
        return None
    value = override.value()
    return value if isinstance(value, kind) else None


def joined(words: Sequence[str]) -> str:
    """Words as they are typed in a shell, with spaces between them."""
    return " ".join(map(shell_word, words))
