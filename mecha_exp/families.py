"""What families of models call their parts: tables of tokens, output layers, ties, sizes, small files.

This module is the only place for these names. They are those of transformers, whose own classes the tests of
`make hf` compare them with, and of projects whose models are merged with those.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

Shapes: TypeAlias = Mapping[str, Sequence[int]]
"""The shape of each key of a model."""

EMBEDDINGS = frozenset(
    {
        *(
            "embed_tokens",
            "embed_tokens_per_layer",
            "word_embeddings",
            "word_embedding",
            "wte",
            "tok_embeddings",
        ),
        *("token_embedding", "tokens_embed", "embed_in", "input_embedding", "value_embeddings"),
    }
)
"""Modules whose weight has a row for each token that is read."""

_EMBEDDINGS_OUTSIDE = frozenset({"shared", "embeddings", "embed"})
"""Names that mean this outside of numbered layers."""

_ANY_EMBEDDINGS = EMBEDDINGS | _EMBEDDINGS_OUTSIDE

_EMBEDDINGS_WHOLE = ("w.weight", "transformer.w.weight")
"""Whole keys; these are of CTRL."""

_OUTPUTS = frozenset(
    {
        "lm_head",
        "generator_lm_head",
        "embed_out",
        "unembed",
        "lm_loss",
        "vocab_projector",
        "output_projection",
    }
)
"""Modules whose weight and bias have an entry for each token that is written."""

_OUTPUTS_IN = frozenset(
    {
        *(
            ("predictions", "decoder"),
            ("lm_head", "decoder"),
            ("lm_head", "out_proj"),
            ("pred_layer", "proj"),
        ),
        ("shared_head", "head"),
    }
)
"""Output layers that are told by their last two names."""

_OUTPUT_VECTORS = ("predictions.bias", "final_logits_bias")
"""The ends of keys of such biases in no layer of their own."""

_OUTPUTS_IF_AS_LARGE = frozenset(
    {"decoder", "proj_out", "output", "head", "head.decoder", "cls", "log_softmax.mlp.layer0"}
)
"""Whole names of modules that are output layers of tokens where they have as many rows as an embedding."""

_TIED_BIAS = re.compile(r"(?P<head>(.+\.)?(predictions|lm_head))(?P<decoder>\.decoder)?\.bias")
_VOCABULARY_SIZE = re.compile(r"(\w+_)?vocab_size(_\w+)?")

_TABLE = re.compile(r".*(embed|wte|wpe|lookup).*|(.*_)?emb|shared|relative_attention_bias")
"""The last names of modules that are tables of rows, of positions and types too."""

LOOKED_UP = re.compile(
    r"(?!patch|unembed)\w*embed(s|ding|dings|ding_table|_tokens(_per_layer)?|_positions|_in)?|"
    r"(pos_)?emb|positional_encoding|wte|wpe|shared|relative_(attention_bias|position_bias_table)|"
    r"(cls|class|mask|reg|register|dist|distillation|storage|query)_tokens?"
)
"""Modules and parameters that are tables of tokens, positions and classes."""

HEADS = re.compile(
    r"(?!hc_)(\w+_)?heads?|head_dist|\w*classifier(_\w+)?|score|qa_outputs|embed_out|unembed\w*|"
    r"(\w+_)?predictions|seq_relationship|vocab_(projector|transform|layer_norm)|\w+_qass|"
    r"sequence_summary|output_projection|logits_proj|embedding_decoder|(column_)?output_(weights|bias)"
)
"""Modules that are output layers, with what belongs to them."""

BEFORE_LAYERS = re.compile(
    r"(?!layernorm_embedding)\w*embed\w*|emb|\w+_emb|emb_\w+|emb(norm|_norm|_ln)|wte|wpe|stem|"
    r"(cls|class|reg|register|dist|mask|distill(ation)?|storage)_tokens?|pos|rel_pos|"
    r"norm_pre|pre_?(layrnorm|layernorm|norm|ln)|ln_(pre|in)|ln0|"
    r"(conv|proj|img|txt|time|vector|guidance|linear|fc|project|text|x)_in|patchify|patch_\w+|"
    r"input_\w+|feature_projection|subsample\w*|relative_attention_bias|per_layer_(model_)?projection(_norm)?"
)
"""Names of modules before the layers of a model. `layernorm_embedding` lies before or after, by family."""

AFTER_LAYERS = re.compile(
    r"embed_out|unembed\w*|de_?embed\w*|embedding_norm|\w+_predictions|"
    r"vocab_(projector|transform|layer_norm)|"
    r"norm|norm_f|norm_out|out_norm|(final|last|output|post)_?(layer_?norm|norm|ln|layer|linear|proj|conv)|"
    r"ln_(f|out|post|final)|layer_?norm|fc_norm|post_?layernorm|"
    r"heads?|\w+_heads?|head_\w+|classifier|fc|score|scores|logits|to_logits|lm_head|pooler|attn_pool|"
    r"(proj|conv|linear|project|norm|fc|dense|time)_out|out|out_proj|output|outputs|\w+_outputs|"
    r"(text|visual|image|vision)_proj(ection)?|proj|projection|predictions|final_logits_bias|qa_outputs",
    re.IGNORECASE,
)
"""Names of modules after them."""

NEVER_SCALED = ("emb", "wte", "wpe", "shared", "lookup", "vocab")
"""Parts of names of embeddings: tables of rows, whose codes no reader multiplies by a scale."""

_CAUSAL_MODELS = ("ForCausalLM", "LMHeadModel")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHead", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
"""In the names of classes of transformers."""

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""The entries of a config that count the layers of a model with one row of them."""

POSITIONS = "position_ids"
"""The last word of the keys of tables of positions."""

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATES = (CHAT_TEMPLATE, "chat_template.json")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")

SENTENCEPIECE_MODELS = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model"),
    *("spm_char.model", "prophetnet.tokenizer", "source.spm", "target.spm"),
)
"""The files that hold a model of sentencepiece."""

OLDER_TOKENIZERS = frozenset(
    {
        *("added_tokens.json", "merges.txt", "vocab.json", "vocab.txt", "vocab-src.json", "vocab-tgt.json"),
        *("bpe.codes", "dict.txt", "emoji.json", "entity_vocab.json", "target_vocab.json", "normalizer.json"),
        *("byte_maps.json", "word_pronunciation.json", "word_shape.json"),
        *SENTENCEPIECE_MODELS,
    }
)
"""The files of tokenizers that `tokenizer.json` is made from."""

TOKENIZER_FILES = frozenset(
    {
        *(TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", *CHAT_TEMPLATES),
        *OLDER_TOKENIZERS,
    }
)
"""The files that belong to a tokenizer."""

SMALL_FILES = frozenset(
    {
        CONFIG,
        GENERATION,
        "adapter_config.json",
        *PROCESSORS,
        "video_preprocessor_config.json",
        *TOKENIZER_FILES,
    }
)
"""The files beside weights that have the same name everywhere."""

SMALL_PATTERNS = ("*.json", "*.txt", "*.jinja", "*.model", "*.spm", "*.codes", "*.tokenizer", "*.tiktoken")
"""Patterns of all files beside weights that decide what a model computes, without code."""

SMALL_SUFFIXES = tuple(pattern[1:] for pattern in SMALL_PATTERNS)
"""The ends of their names."""


def token_tables(shapes: Shapes) -> dict[str, int]:
    """The keys whose tensors have an entry for each token, with the axis of the tokens.

    >>> token_tables({"model.embed_tokens.weight": (9, 4), "final_logits_bias": (1, 9), "fc.weight": (9, 4)})
    {'model.embed_tokens.weight': 0, 'final_logits_bias': 1}
    """
    likely = {key: shape for key, shape in shapes.items() if may_have_tokens(key) and shape}
    counts = {shape[0] for key, shape in likely.items() if is_embedding(key)}
    return {
        key: len(shape) - 1 if key.endswith("logits_bias") else 0
        for key, shape in likely.items()
        if shape[0] in counts or is_embedding(key) or is_output(key)
    }


@lru_cache(maxsize=1 << 17)
def may_have_tokens(key: str) -> bool:
    """Whether a key may have an entry for each token, by its name; shapes tell the rest."""
    return is_embedding(key) or is_output(key) or key.rpartition(".")[0] in _OUTPUTS_IF_AS_LARGE


def is_embedding(key: str) -> bool:
    """Whether a key is a table with a row for each token that is read."""
    module, _, last = key.rpartition(".")
    name = module.rpartition(".")[2]
    if last != "weight" or name not in _ANY_EMBEDDINGS:
        return key in _EMBEDDINGS_WHOLE
    return name in EMBEDDINGS or not any(word.isdecimal() for word in module.split("."))


def is_shared(key: str) -> bool:
    """Whether a key is a table of which an encoder and a decoder have one each, tied to it."""
    return is_embedding(key) and key.split(".")[-2] == "shared"


def is_output(key: str) -> bool:
    """Whether a key is the weight or bias of a layer that writes tokens, by its name alone."""
    module, _, last = key.rpartition(".")
    if last not in ("weight", "bias"):
        return key.endswith(_OUTPUT_VECTORS)
    around, _, name = module.rpartition(".")
    return (
        name in _OUTPUTS or (around.rpartition(".")[2], name) in _OUTPUTS_IN or key.endswith(_OUTPUT_VECTORS)
    )


def is_table(key: str) -> bool:
    """Whether a key is a table whose rows are looked up, of tokens or positions, and not multiplied with."""
    return is_embedding(key) or _TABLE.fullmatch(key.rpartition(".")[0].rpartition(".")[2]) is not None


def is_language_model(config: Mapping[str, Any]) -> bool:
    """Whether the architecture that a config names writes tokens, so that its output layer may be tied."""
    return any(word in name for name in _architectures(config) for word in _LANGUAGE_MODELS)


def is_causal_model(config: Mapping[str, Any]) -> bool:
    """Whether the architecture that a config names writes the next token."""
    return any(name.endswith(_CAUSAL_MODELS) for name in _architectures(config))


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def embeddings(shapes: Shapes) -> list[str]:
    """The embeddings of a model."""
    return [key for key, shape in shapes.items() if len(shape) == 2 and is_embedding(key)]


def output_layers(shapes: Shapes) -> list[str]:
    """The weights of the layers of a model that write tokens."""
    return [key for key in token_tables(shapes) if key.endswith(".weight") and not is_embedding(key)]


def tied_to(key: str, shapes: Shapes, shape: Sequence[int] = ()) -> str | None:
    """The key of a model that has the values of one that it lacks, as tied models do; None if there is none.

    The output layer of a model that has none has those of the embedding that lies nearest to it, and of
    several equally near ones the decoder's. The embeddings of an encoder and of a decoder have those of one
    around both.

    >>> tied_to("lm_head.weight", {"model.encoder.norm.weight": (4,), "model.shared.weight": (9, 4)})
    'model.shared.weight'

    Args:
        key: the one that is missing.
        shapes: of the model that lacks it.
        shape: its shape in a model that has it: an embedding of this shape comes first.
    """
    if bias := _TIED_BIAS.fullmatch(key):
        other = f"{bias['head']}{'' if bias['decoder'] else '.decoder'}.bias"
        return other if other in shapes else None
    if not key.endswith(".weight"):
        return None
    tables = [table for table in embeddings(shapes) if "per_layer" not in table and table != key]
    tables = [table for table in tables if "/" not in table]  # statistics of a table, such as `fisher/KEY`
    if is_embedding(key):
        own = _module_around(key)
        has_own = any(other.startswith(f"{own}.") for other in shapes)
        tables = [table for table in tables if has_own and _module_around(table) in _modules(own)]
    elif output_layers(shapes) or not (is_output(key) or key.rpartition(".")[0] in _OUTPUTS_IF_AS_LARGE):
        return None

    def nearness(table: str) -> tuple[bool, int, bool]:
        return tuple(shapes[table]) == tuple(shape), shared_words(table, key), "decoder" in table

    return max(tables, key=nearness, default=None)


def output_tied_to(embedding: str) -> str | None:
    """The output layer that a causal language model would have if it were not tied; None if that is not told.

    >>> output_tied_to("language_model.model.embed_tokens.weight")
    'language_model.lm_head.weight'
    """
    name = embedding.split(".")[-2]
    if ".embeddings." in embedding:  # an encoder's, whose head for masked tokens has many names
        return None
    if name == "embed_in":
        return "embed_out.weight"
    tower, inner, _ = embedding.rpartition(".model.")
    return f"{tower}.lm_head.weight" if inner and not embedding.startswith("model.") else "lm_head.weight"


def _module_around(key: str) -> str:
    """The module that holds the module of a key: `model` for `model.shared.weight`."""
    return ".".join(key.split(".")[:-2])


def _modules(name: str) -> Iterator[str]:
    """The modules around a module, the outermost one, which has no name, among them."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def shared_words(one: str, other: str) -> int:
    """How many words two dotted names begin with together."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def vocabulary_sizes(config: Mapping[str, Any], counts: Mapping[int, int]) -> dict[str, Any]:
    """The entries of a config that hold sizes of vocabularies, with new sizes; nested ones in whole.

    >>> vocabulary_sizes({"text_config": {"vocab_size": 9, "hidden_size": 9}}, {9: 11})
    {'text_config': {'vocab_size': 11, 'hidden_size': 9}}

    Args:
        config: of a model.
        counts: by the number of rows that its embeddings have the one that they get.
    """
    changes: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            if inner := vocabulary_sizes(value, counts):
                changes[name] = {**value, **inner}
        elif _VOCABULARY_SIZE.fullmatch(name) and isinstance(value, int) and value in counts:
            changes[name] = counts[value]
    return changes
