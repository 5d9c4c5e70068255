"""What tests of language models share: a vocabulary, its tokenizer, a task in its words."""

from pathlib import Path

WORDS = "cat sat on mat dog ran in park sun is hot cold ice blue red sky grass green big small yes no"
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TASK = """
task: word_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 1.0}
"""


def write_llama(folder: Path, seed: int, *, spread: float = 0.5, **sizes: int) -> Path:
    """A Llama of random weights in a folder, with a tokenizer. Returns the folder."""
    import torch
    import transformers

    torch.manual_seed(seed)
    more = {"vocab_size": 40, "max_position_embeddings": 64, "initializer_range": spread}
    config = transformers.LlamaConfig(**{**SMALL, **more, **sizes})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, words: str = WORDS) -> None:
    """A tokenizer with a token for each word."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    numbers = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *words.split()])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
