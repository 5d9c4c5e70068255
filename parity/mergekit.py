"""Write what mergekit makes: `python -m parity.mergekit FILE TOKENS MIXTURES SURGERY MODULES`.

It runs in mergekit's own environment. tests/mergekit compares ours with the files.
"""

import importlib.metadata
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml
from safetensors.torch import load_file, save_file

from tests.support.mergekit_configs import CONFIGS, write_models
from tests.support.mergekit_mixtures import MIXTURE_CONFIGS, write_mixture_models
from tests.support.mergekit_modules import MODULE_CONFIGS, write_module_models
from tests.support.mergekit_tokens import TOKEN_CONFIGS, TRANSPLANTS, VOCABULARY_KEYS, write_token_models


def merged(config: str, output: Path) -> Path:
    """The folder that mergekit makes of a configuration.

    Of several documents it is that of the one without a name; the others are made before it, as folders of
    the current one, which is what `mergekit-multi` does. Its own command fails on them in 0.1.5: pydantic
    finds a circular reference in what it passes on.
    """
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    remaining = list(yaml.safe_load_all(config))
    if "experts" in remaining[0]:
        return mixture(remaining[0], output)
    while remaining:
        names = {document.get("name") for document in remaining}
        ready = next(d for d in remaining if not names & set(strings_in(d)) - {d.get("name")})
        remaining.remove(ready)
        name = ready.pop("name", None)
        path = Path(name) if name else output
        configuration = MergeConfiguration.model_validate(ready)
        run_merge(configuration, str(path), MergeOptions(quiet=True, write_model_card=False))
    return output


def mixture(config: object, output: Path) -> Path:
    """The folder that `mergekit-moe` makes of a configuration."""
    from mergekit.moe.config import MoEMergeConfig
    from mergekit.options import MergeOptions
    from mergekit.scripts.moe import build

    output.mkdir(parents=True)
    build(MoEMergeConfig.model_validate(config), str(output), MergeOptions(), device="cpu")
    return output


def strings_in(document: object) -> list[str]:
    """All strings in a document."""
    return re.findall('"([^"]+)"', json.dumps(document))


def write_golden(golden: Path, configs: Mapping[str, str], write: Callable[[Path], None]) -> None:
    """Merge configurations, and write the tensors with what else the outputs say.

    Args:
        golden: the file.
        configs: by name.
        write: writes their models into a folder.
    """
    tensors, facts = {}, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        os.chdir(folder)
        for number, (config, text) in enumerate(configs.items()):
            output = merged(text, folder / "merged" / str(number))
            tensors |= {f"{config}|{key}": t for key, t in load_file(output / "model.safetensors").items()}
            facts[config] = facts_of(output)
    about = {"oracle": f"mergekit {importlib.metadata.version('mergekit')}", "configs": json.dumps(facts)}
    save_file(tensors, golden, metadata=about)
    sys.stdout.write(f"{len(configs)} configurations, {golden.stat().st_size:,} bytes in {golden}\n")


def write_transplants(golden: Path) -> None:
    """Write the rows that `mergekit-tokensurgeon` makes for tokens which a model lacks."""
    from mergekit.scripts.tokensurgeon import main as tokensurgeon

    tensors = {}
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        write_token_models(Path(name))
        for number, (how, words) in enumerate(TRANSPLANTS.items()):
            tokensurgeon(["a", "words", str(number), *words], standalone_mode=False)
            made = load_file(Path(name) / str(number) / "model.safetensors")
            tensors |= {f"{how}|{key}": made[key] for key in VOCABULARY_KEYS}
    save_file(tensors, golden, metadata={"oracle": f"mergekit {importlib.metadata.version('mergekit')}"})
    sys.stdout.write(f"{len(TRANSPLANTS)} transplants, {golden.stat().st_size:,} bytes in {golden}\n")


def facts_of(output: Path) -> dict[str, object]:
    """What the config.json of a model says of its size, and its tokens by number."""
    content = json.loads((output / "config.json").read_text())
    facts = {word: content[word] for word in ("num_hidden_layers", "vocab_size") if word in content}
    path = output / "tokenizer.json"
    tokenizer = json.loads(path.read_text()) if path.is_file() else {"model": {"vocab": None}}
    if not isinstance(tokenizer["model"]["vocab"], dict):  # transformers makes one where the models have none
        return facts
    numbers = {**tokenizer["model"]["vocab"], **{e["content"]: e["id"] for e in tokenizer["added_tokens"]}}
    facts |= {word: content[word] for word in content if "expert" in word or word == "model_type"}
    return {**facts, "tokens": sorted(numbers, key=numbers.__getitem__)}


def main(*paths: str) -> None:
    """Write the five files."""
    configs, tokens, mixtures, surgery, modules = (Path(path).resolve() for path in paths)
    write_golden(configs, CONFIGS, write_models)
    write_golden(tokens, TOKEN_CONFIGS, write_token_models)
    write_golden(mixtures, MIXTURE_CONFIGS, write_mixture_models)
    write_transplants(surgery)
    write_golden(modules, MODULE_CONFIGS, write_module_models)


if __name__ == "__main__":
    main(*sys.argv[1:])
