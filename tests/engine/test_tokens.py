"""Models with one number of tokens are merged only if the tokens are the same."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import mecha_exp as mx
from mecha_exp.errors import CheckpointError

WORDS = ["<s>", "a", "b", "c", "d", "e"]


def numbered(words: list[str]) -> dict[str, int]:
    return {word: number for number, word in enumerate(words) if word}


def tokenizer_json(words: list[str]) -> dict[str, str]:
    added = [{"id": len(words) - 1, "content": words[-1]}] if words[-1] else []
    content = {"model": {"type": "BPE", "vocab": numbered(words[:-1]), "merges": []}, "added_tokens": added}
    return {"tokenizer.json": json.dumps(content)}


def unigram(words: list[str]) -> dict[str, str]:
    return {"tokenizer.json": json.dumps({"model": {"vocab": [[word, -1.0] for word in words]}})}


def vocab_json(words: list[str]) -> dict[str, str]:
    return {
        "vocab.json": json.dumps(numbered(words[:-1])),
        "added_tokens.json": json.dumps({words[-1]: len(words) - 1}),
        "merges.txt": "#version: 0.2\na b\n",
    }


def vocab_txt(words: list[str]) -> dict[str, str]:
    return {"vocab.txt": "\n".join(words) + "\n"}


FORMATS = {"json": tokenizer_json, "unigram": unigram, "vocab.json": vocab_json, "vocab.txt": vocab_txt}


def folder(path: Path, files: dict[str, str], tokens: int = 6) -> Path:
    path.mkdir()
    tensors = {"model.embed_tokens.weight": torch.rand(tokens, 2), "model.layers.0.w": torch.rand(2, 2)}
    save_file(tensors, path / "model.safetensors")
    for name, text in {"config.json": json.dumps({"vocab_size": tokens}), **files}.items():
        (path / name).write_text(text)
    return path


def halves(a: Path, b: Path, **options: str) -> dict[str, torch.Tensor]:
    return mx.merge(mx.weighted_sum(a, b), options=mx.EngineOptions(**options))


@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("place", [1, 5])
def test_other_tokens_are_refused_by_name_in_every_format(first, second, place, tmp_path):
    others = [*WORDS]
    others[place] = "<|im_start|>"
    a = folder(tmp_path / "a", FORMATS[first](WORDS))
    b = folder(tmp_path / "b", FORMATS[second](others))

    with pytest.raises(CheckpointError) as error:
        halves(a, b)

    assert f"token {place} is '{WORDS[place]}' and '<|im_start|>'" in str(error.value)
    assert "on_tokens=merge" in str(error.value)
    assert halves(a, b, on_tokens="merge")["model.embed_tokens.weight"].shape == (6, 2)
    assert halves(a, folder(tmp_path / "c", FORMATS[second](WORDS)))


def test_one_token_at_two_numbers_is_refused(tmp_path):
    a = folder(tmp_path / "a", vocab_json([*WORDS[:4], "", "x"]))
    b = folder(tmp_path / "b", tokenizer_json([*WORDS[:4], "x", ""]))

    with pytest.raises(CheckpointError, match=r"'x' is token 5 and token 4"):
        halves(a, b)


def test_a_token_that_only_one_model_names_is_not_a_difference(tmp_path):
    a = folder(tmp_path / "a", tokenizer_json([*WORDS[:5], ""]))
    b = folder(tmp_path / "b", tokenizer_json(WORDS))

    assert halves(a, b)


def test_other_merges_and_other_sentencepiece_models_are_refused(tmp_path):
    a = folder(tmp_path / "a", vocab_json(WORDS))
    b = folder(tmp_path / "b", {**vocab_json(WORDS), "merges.txt": "#version: 0.2\nb a\n"})
    c, d = (folder(tmp_path / name, {"tokenizer.model": name}) for name in "cd")

    with pytest.raises(CheckpointError, match="their merges differ from number 0 on"):
        halves(a, b)
    with pytest.raises(CheckpointError, match="their sentencepiece models differ"):
        halves(c, d)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"model": 3}', '{"model": {"vocab": "x"}, "added_tokens": [1]}']
)
def test_a_tokenizer_that_cannot_be_read_stops_nothing(text, tmp_path):
    a = folder(tmp_path / "a", {"tokenizer.json": text})

    assert halves(a, folder(tmp_path / "b", tokenizer_json(WORDS)))


@pytest.mark.parametrize(("resize", "words"), [("pad", [*WORDS, "f", "g"]), ("truncate", WORDS)])
def test_a_folder_has_the_tokenizer_of_the_model_whose_vocabulary_it_has(resize, words, tmp_path):
    short = folder(tmp_path / "short", {**tokenizer_json(WORDS), "added_tokens.json": "{}"})
    long = folder(tmp_path / "long", tokenizer_json([*WORDS, "f", "g"]), tokens=8)

    for number, inputs in enumerate([(short, long), (long, short)]):
        output = tmp_path / f"merged{number}"
        options = mx.EngineOptions(resize_embeddings=resize)
        mx.merge_many([mx.Job(mx.weighted_sum(*inputs), output)], options)
        assert json.loads((output / "config.json").read_text())["vocab_size"] == len(words)
        assert (output / "tokenizer.json").read_text() == tokenizer_json(words)["tokenizer.json"]
        assert (output / "added_tokens.json").exists() == (resize == "truncate")


def test_a_folder_that_gets_no_tokenizer_is_said(tmp_path: Path, caplog):
    plain = folder(tmp_path / "plain", {})
    with_tokens = folder(tmp_path / "with_tokens", tokenizer_json(WORDS))

    mx.merge(mx.weighted_sum(plain, with_tokens), tmp_path / "lacking")

    said = f"{plain} has no tokenizer, so the merged folder gets none. {with_tokens} has one: copy it if"
    assert said in caplog.text
    assert not (tmp_path / "lacking" / "tokenizer.json").exists()
    caplog.clear()

    mx.merge(mx.weighted_sum(with_tokens, plain), tmp_path / "whole")
    mx.merge(mx.weighted_sum(plain, with_tokens), tmp_path / "one.safetensors")

    assert "no tokenizer" not in caplog.text
    assert (tmp_path / "whole" / "tokenizer.json").is_file()
