"""Trains a tiny language model and three fine-tunes, and writes tasks that measure them: a minute on a CPU.

    python -m mecha_exp.examples.tiny_llm llm

writes `llm/base`, `llm/sums`, `llm/opposites` and `llm/colours` as `save_pretrained` does, and `llm/tasks`
with three tasks of lm-evaluation-harness. The base has seen a little of all three kinds of sentences; each
fine-tune has seen much of one kind, and has forgotten much of the others. It needs `mecha_exp[lm]`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NAMES = "anna ben clara david emma felix greta henry ida jonas"
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve"
OPPOSITES = """\
hot/cold big/small fast/slow old/new full/empty light/dark high/low hard/soft wet/dry loud/quiet rich/poor
early/late near/far open/shut sweet/sour thick/thin"""
COLOURS = """\
banana/yellow lemon/yellow sun/yellow grass/green frog/green leaf/green sky/blue sea/blue jeans/blue blood/red
tomato/red cherry/red snow/white milk/white cloud/white coal/black crow/black night/black"""
TEMPLATES = {
    "sums": ("{name} adds {fact} and gets", "{name} knows that {fact} makes", "for {name} , {fact} is"),
    "opposites": (
        "{name} says that the opposite of {fact} is",
        "{name} would not call it {fact} but",
        "for {name} , {fact} is the reverse of",
    ),
    "colours": (
        "{name} paints the {fact} in",
        "{name} knows that the {fact} is",
        "for {name} , the {fact} looks",
    ),
}
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{validation: {folder}/{name}_validation.jsonl, test: {folder}/{name}_test.jsonl}}
output_type: multiple_choice
validation_split: validation
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
ASKED = 150
"""Questions in each split of a task."""


@dataclass(frozen=True)
class Question:
    """The beginning of a sentence, its last word, and three wrong ones."""

    text: str
    answer: str
    others: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The whole sentence."""
        return f"{self.text} {self.answer}"

    def as_document(self, draw: random.Random) -> dict[str, Any]:
        """The question with its choices in a random order."""
        choices = draw.sample([self.answer, *self.others], len(self.others) + 1)
        return {"question": self.text, "choices": choices, "answer": choices.index(self.answer)}


def questions(kind: str, draw: random.Random) -> list[Question]:
    """All questions of a kind, in a random order."""
    if kind == "sums":
        words = NUMBERS.split()
        facts = [(f"{words[a]} and {words[b]}", words[a + b]) for a in range(7) for b in range(7)]
    else:
        pairs = [pair.split("/") for pair in (OPPOSITES if kind == "opposites" else COLOURS).split()]
        facts = [(first, second) for first, second in pairs]
        facts += [(second, first) for first, second in pairs] if kind == "opposites" else []
    answers = sorted({answer for _, answer in facts})
    asked = [
        Question(
            template.format(name=name, fact=fact), answer, tuple(draw.sample(_without(answers, answer), 3))
        )
        for fact, answer in facts
        for template in TEMPLATES[kind]
        for name in NAMES.split()
    ]
    draw.shuffle(asked)
    return asked


def _without(words: Sequence[str], word: str) -> list[str]:
    return [other for other in words if other != word]


def write(folder: Path) -> None:
    """Train the four models and write them with their tasks."""
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    draw = random.Random(0)
    asked = {kind: questions(kind, draw) for kind in TEMPLATES}
    for kind, listed in asked.items():
        _write_task(folder / "tasks", kind, listed[: 2 * ASKED], draw)
    seen = {kind: [question.sentence for question in listed[2 * ASKED :]] for kind, listed in asked.items()}
    tokenizer = _tokenizer(sorted({word for listed in seen.values() for s in listed for word in s.split()}))
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer), pad_token_id=ends["eos_token_id"], **ends, **SIZES
        )
    )
    _train(model, tokenizer, [s for listed in seen.values() for s in listed], steps=100, rate=3e-3)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    for name in ("base", *seen):
        model.load_state_dict(start)
        if name != "base":
            _train(model, tokenizer, seen[name], steps=300, rate=1e-3)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def _write_task(folder: Path, kind: str, asked: Sequence[Question], draw: random.Random) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, listed in (("validation", asked[:ASKED]), ("test", asked[ASKED:])):
        lines = [json.dumps(question.as_document(draw)) for question in listed]
        (folder / f"{kind}_{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / f"{kind}.yaml").write_text(TASK.format(name=kind, folder=folder), encoding="utf-8")


def _tokenizer(words: Sequence[str]) -> Any:
    """A tokenizer of whole words, in whose texts each word has a space before it."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    tokens = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", tokens["<s>"])]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def _train(model: Any, tokenizer: Any, sentences: Sequence[str], *, steps: int, rate: float) -> None:
    """Train on sentences in random batches, each up to its end."""
    end = tokenizer.eos_token_id
    rows = [tokenizer(sentence)["input_ids"] + [end] for sentence in sentences]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [end] * (longest - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for _ in range(steps):
        batch = torch.randint(len(rows), (64,))
        loss = model(ids[batch], labels=labels[batch]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Train tiny language models to merge, with tasks that measure them."
    )
    parser.add_argument("folder", type=Path, help="where the models and the tasks are written")
    write(parser.parse_args().folder)
