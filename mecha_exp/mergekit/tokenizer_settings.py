"""What a configuration says about tokens: the tokenizer, where rows come from, and the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mecha_exp.errors import ConfigError, Problems, brief, did_you_mean
from mecha_exp.mergekit.references import Reference, read_reference
from mecha_exp.mergekit.settings import check_known, read_each
from mecha_exp.numbers import is_whole

UNION, BASE = "union", "base"
"""Tokenizers that are not those of a model that is named."""

AUTO = "auto"
"""The chat template that most models have."""

CHAT_TEMPLATES: Mapping[str, str] = {
    "alpaca": r"""
{%- set answer = '### Response:\n' -%}
{%- set heads = {'user': '### Instruction:\n', 'user_context': '### Input:\n', 'assistant': answer} -%}
{%- for turn in messages -%}
{{- ('' if loop.first else '\n\n') ~ heads.get(turn.role, '') ~ turn.content | trim -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '\n\n' ~ answer -}}{%- endif -%}
""",
    "chatml": r"""
{%- for turn in messages -%}
{{- '<|im_start|>' ~ turn.role ~ '\n' ~ turn.content ~ '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""",
    "exaone": r"""
{%- if not messages or messages[0].role != 'system' -%}{{- '[|system|][|endofturn|]\n' -}}{%- endif -%}
{%- for turn in messages -%}
{{- '[|' ~ turn.role ~ '|]' ~ turn.content ~ ('' if turn.role == 'user' else '[|endofturn|]') ~ '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '[|assistant|]' -}}{%- endif -%}
""",
    "llama3": r"""
{%- set head, end = '<|start_header_id|>', '<|end_header_id|>\n\n' -%}
{{- bos_token -}}
{%- for turn in messages -%}{{- head ~ turn.role ~ end ~ turn.content | trim ~ '<|eot_id|>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- head ~ 'assistant' ~ end -}}{%- endif -%}
""",
    "mistral": r"""
{%- set has_system = messages and messages[0].role == 'system' -%}
{{- bos_token -}}
{%- for turn in (messages[1:] if has_system else messages) -%}
{%- if turn.role != ('assistant' if loop.index0 % 2 else 'user') -%}
{{- raise_exception('After a system message, user and assistant take turns, and the user begins.') -}}
{%- elif turn.role == 'assistant' -%}{{- ' ' ~ turn.content ~ eos_token -}}
{%- else -%}
{%- set before = messages[0].content ~ '\n\n' if loop.first and has_system else '' -%}
{{- ' [INST] ' ~ before ~ turn.content ~ ' [/INST]' -}}
{%- endif -%}
{%- endfor -%}
""",
}
"""The formats of chats that mergekit has names for, in Jinja. The lines are joined where they are used.

Sources: Stanford Alpaca's prompts; OpenAI's ChatML; the model cards of EXAONE 3 and Llama 3; the first format
of Mistral's instruct models.
"""

ZERO, MODEL_TOKEN = "zero", "model_token"


@dataclass(frozen=True)
class TokenSource:
    """Where the row of a token comes from in models that lack it.

    Attributes:
        model: the model whose row is taken; None stands for zeros.
        token: the other token of that model whose row it is, or its number; None is the token itself.
        force: whether models that have the token get this row as well.
        where: its place in the configuration, for messages.
    """

    model: Reference | None
    token: str | int | None
    force: bool
    where: str


@dataclass(frozen=True)
class TokenizerSettings:
    """The tokenizer that the output gets.

    Attributes:
        source: `union`, `base`, or the model that has it.
        tokens: the source of single tokens; those that the tokenizer lacks are added to it.
        multiple: the number of rows is padded to a multiple of this.
        where: its place in the configuration, for messages.
    """

    source: str | Reference
    tokens: Mapping[str, TokenSource] = field(default_factory=dict)
    multiple: int = 1
    where: str = "tokenizer_source"

    @property
    def references(self) -> list[Reference]:
        """The models that are named."""
        sources = [self.source, *(token.model for token in self.tokens.values())]
        return [source for source in sources if isinstance(source, Reference)]


def read_tokenizer(config: Mapping[str, Any]) -> TokenizerSettings | None:
    """Read `tokenizer_source`, or the section `tokenizer`; None where there is neither.

    Raises:
        ConfigError: there are both, or all in them that cannot be read.
    """
    section, source = config.get("tokenizer"), config.get("tokenizer_source")
    if section is None:
        return None if source is None else TokenizerSettings(_source(source, "tokenizer_source"))
    if source is not None:
        raise ConfigError("tokenizer and tokenizer_source: give one of them.")
    if not isinstance(section, Mapping):
        raise ConfigError(f"tokenizer: expected a mapping with 'source', got {brief(section)}.")
    problems = Problems()
    with problems.collected(ConfigError):
        check_known(section, ("source", "tokens", "pad_to_multiple_of"), "tokenizer")
    with problems.collected(ConfigError):
        source = _source(section.get("source", UNION), "tokenizer.source")
    with problems.collected(ConfigError):
        tokens = _tokens(section.get("tokens") or {})
    with problems.collected(ConfigError):
        multiple = _multiple(section.get("pad_to_multiple_of"))
    problems.raise_as(ConfigError)
    return TokenizerSettings(source, tokens, multiple, "tokenizer.source")


def read_chat_template(config: Any) -> str | None:
    """A chat template: as text, by the name of its format, or `auto`; ConfigError for any other name."""
    if config is None:
        return None
    if isinstance(config, str) and (config == AUTO or "{" in config):
        return config
    if config not in CHAT_TEMPLATES:
        known, name = [AUTO, *CHAT_TEMPLATES], str(config)
        raise ConfigError(
            f"chat_template: there is no template {brief(config)}.{did_you_mean(name, known)} The names are "
            f"{', '.join(known)}; any other template is given as text, in Jinja."
        )
    return CHAT_TEMPLATES[config].replace("\n", "")


def _source(source: Any, where: str) -> str | Reference:
    return source if source in (UNION, BASE) else read_reference(source, where)


def _multiple(value: Any) -> int:
    if value is None:
        return 1
    if not is_whole(value, least=1):
        raise ConfigError(
            f"tokenizer.pad_to_multiple_of: expected a whole number above 0, got {brief(value)}."
        )
    return value


def _tokens(section: Any) -> dict[str, TokenSource]:
    if not isinstance(section, Mapping):
        raise ConfigError(f"tokenizer.tokens: expected a mapping of tokens, got {brief(section)}.")
    sources = read_each(lambda item: _token(item[1], f"tokenizer.tokens.{item[0]}"), section.items())
    return dict(zip(map(str, section), sources, strict=True))


def _token(entry: Any, where: str) -> TokenSource:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected a mapping with 'source', got {brief(entry)}.")
    check_known(entry, ("source", "force"), where)
    force, source = entry.get("force", False), entry.get("source")
    if not isinstance(force, bool):
        raise ConfigError(f"{where}.force: expected true or false, got {brief(force)}.")
    if source is None:
        raise ConfigError(
            f"{where}: names no 'source', without which mergekit has no row. Name a model, or write "
            "source: {kind: zero}"
        )
    if isinstance(source, Mapping) and "kind" in source:
        return _of_kind(source, force, f"{where}.source")
    return TokenSource(read_reference(source, f"{where}.source"), None, force, where)


def _of_kind(source: Mapping[str, Any], force: bool, where: str) -> TokenSource:
    """Zeros, or the row of another token of a model."""
    kind = source["kind"]
    if kind == ZERO:
        check_known(source, ("kind",), where)
        return TokenSource(None, None, force, where)
    if kind != MODEL_TOKEN:
        raise ConfigError(f"{where}.kind: expected {ZERO} or {MODEL_TOKEN}, got {brief(kind)}.")
    check_known(source, ("kind", "model", "token", "token_id"), where)
    tokens = [source[word] for word in ("token", "token_id") if source.get(word) is not None]
    if len(tokens) != 1 or not (is_whole(source.get("token_id")) or isinstance(tokens[0], str)):
        raise ConfigError(f"{where}: expected either 'token', a text, or 'token_id', a whole number.")
    return TokenSource(read_reference(source.get("model"), f"{where}.model"), tokens[0], force, where)
