"""Words for a part of a list: `+models.experts=x` appends, `weights.0=1` or `weights.photos=1` change one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mecha_exp.app.words.experts import names_of
from mecha_exp.app.words.plain_data import as_written
from mecha_exp.app.words.quotes import parse, quoted, shell_word
from mecha_exp.errors import ConfigError, counted, did_you_mean
from mecha_exp.numbers import is_number

_EXPERTS = "models.experts"
WEIGHTS = "weights"
_VARIED = "the list has several values itself, so give whole lists:"


def fit_lists(
    overrides: Sequence[Override], config: DictConfig, is_group: Callable[[Override], bool]
) -> list[str]:
    """The overrides as words, with whole lists before the words that change a part of one.

    Args:
        overrides: of the command line.
        config: the configuration with its groups chosen.
        is_group: whether an override chooses an option of a group.

    Raises:
        ConfigError: an index beyond the end of a list, or a part of a list that is itself varied.
    """
    lists = _Lists(config)

    def is_plain(override: Override) -> bool:
        return is_group(override) or override.is_hydra_override() or override.is_delete()

    # Whole lists come first: one after its own parts would take them back.
    ordered = sorted(overrides, key=lambda override: 0 if is_plain(override) else lists.rank(override))
    return [
        word
        for override in ordered
        for word in ([str(override.input_line)] if is_plain(override) else lists.words(override))
    ]


class _Lists:
    """The lists of a configuration as the words of a command line change them."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self._lists: dict[str, list[str] | None] = {}

    def rank(self, override: Override) -> int:
        """0 for what sets a whole value, 1 for what is appended to a list, 2 for an item of a list."""
        parent, _, index = override.key_or_group.rpartition(".")
        is_item = bool(parent) and (index.isdecimal() or parent == WEIGHTS) and self._has_items(parent)
        return 2 if is_item else int(override.is_add() and self._is_list(override.key_or_group))

    def words(self, override: Override) -> list[str]:
        """The words that stand for an override."""
        key = override.key_or_group
        parent, _, index = key.rpartition(".")
        word = str(override.input_line)
        if key.startswith(f"{WEIGHTS}.") and not index.isdecimal() and self._has_items(WEIGHTS):
            return self._item(WEIGHTS, self._place(key.removeprefix(f"{WEIGHTS}."), word), override, word)
        if key in self._lists or self._is_list(key):
            return self._whole(key, override)
        if parent and index.isdecimal() and len(index) < 6 and self._has_items(parent):
            return self._item(parent, int(index), override, word)
        return [word]

    def _place(self, name: str, word: str) -> int:
        """The place of an expert by its name, as `names_of` gives it."""
        names = names_of([_plain(text) for text in self._items(_EXPERTS) or ()])
        if name not in names:
            known = f" They are {', '.join(names)}." if names else ""
            raise ConfigError(
                f"{word}: models.experts has no expert '{name}'.{did_you_mean(name, names) or known}"
            )
        return names.index(name)

    def _whole(self, key: str, override: Override) -> list[str]:
        """The words for a new value of a list, or for values that are appended to it."""
        texts = _texts(override)
        if texts is None:
            return [str(override.input_line)]
        appends = override.is_add()
        before = self._items(key) if appends else []
        if before is None:
            raise ConfigError(f"+{key}: {_VARIED} {key}=[a,b],[a,c].")
        lists = [[*before, *texts_of_one] for texts_of_one in texts]
        self._lists[key] = lists[0] if len(lists) == 1 else None
        sign = "++" if override.is_force_add() else ""
        return [f"{sign}{key}={','.join(map(_list_text, lists))}"]

    def _item(self, key: str, index: int, override: Override, word: str) -> list[str]:
        """The words for one item of a list: the whole list before it where it is new."""
        items = self._items(key)
        if items is None:
            raise ConfigError(f"{word}: {_VARIED} {key}=[a,b],[a,c].")
        value = word.partition("=")[2]
        if index > len(items):
            following = shell_word(f"{key}.{len(items)}={value}")
            raise ConfigError(
                f"{word}: {key} has {counted(len(items), 'value')}, so the next one is {following}."
            )
        is_whole = key in self._lists or self._is_list(key)
        texts = _texts(override)
        first = texts[0][0] if texts and len(texts[0]) == 1 else "null"
        items = items if index < len(items) else [*items, first]
        changed = [first if i == index else item for i, item in enumerate(items)]
        is_new = not is_whole or len(items) != len(self._items(key) or ())
        self._lists[key] = changed
        plain = f"{key}.{index}={value}"
        return [f"{key}={_list_text(items)}", plain] if is_new else [plain]

    def _items(self, key: str) -> list[str] | None:
        """The items of a list as texts of the command line; a number counts once for each expert."""
        if key in self._lists:
            return self._lists[key]
        value = OmegaConf.select(self._config, key)
        if isinstance(value, ListConfig):
            return [_as_text(item) for item in as_written(value)]
        return [_as_text(value)] * len(self._items(_EXPERTS) or ())

    def _has_items(self, key: str) -> bool:
        """Whether a key is a list, or a number of the recipe that may be one for each expert."""
        return key in self._lists or self._is_list(key) or self._is_number_of_each(key)

    def _is_list(self, key: str) -> bool:
        return isinstance(_select(self._config, key), ListConfig)

    def _is_number_of_each(self, key: str) -> bool:
        value = _select(self._config, key)
        return key == WEIGHTS and is_number(value)


def _texts(override: Override) -> list[list[str]] | None:
    """The items of each value of an override as texts; None for a value that cannot be told yet."""
    if override.is_interval_sweep():
        return None
    if not override.is_sweep_override():
        return _items_of(override.value())
    if not override.is_discrete_sweep():
        return None
    values = []
    for text in override.sweep_string_iterator():
        parsed = parse(f"x={text}")
        items = _items_of(parsed.value()) if parsed is not None and not parsed.is_sweep_override() else None
        if items is None:
            return None
        values += items
    return values


def _items_of(value: Any) -> list[list[str]] | None:
    """The items of a value; None if it is neither a list nor a plain value."""
    if isinstance(value, list):
        return [[_as_text(item) for item in value]]
    is_reference = isinstance(value, str) and value.startswith("${") and value.endswith("}")
    return None if value is None or isinstance(value, dict) or is_reference else [[_as_text(value)]]


def _plain(text: str) -> str:
    """The value of a text of the command line, without the quotes that it may need there."""
    parsed = parse(f"x={text}")
    return text if parsed is None else str(parsed.value())


def _list_text(items: Sequence[str]) -> str:
    return f"[{','.join(items)}]"


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value) if not value.startswith("${") else value
    if isinstance(value, list):
        return _list_text([_as_text(item) for item in value])
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_as_text(item)}" for key, item in value.items()) + "}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _select(config: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException:  # a reference that leads nowhere
        return None
