"""Write what mergekit makes of the configurations: `python -m parity.mergekit golden.safetensors`.

It runs in mergekit's own environment. tests/mergekit compares ours with the file.
"""

import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path

import yaml
from safetensors.torch import load_file, save_file

from parity.mergekit_configs import CONFIGS, write_models


def merged(name: str, folder: Path) -> Path:
    """The folder that `mergekit-yaml` makes of a configuration."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    output = folder / "merged" / str(list(CONFIGS).index(name))
    configuration = MergeConfiguration.model_validate(yaml.safe_load(CONFIGS[name]))
    run_merge(configuration, str(output), MergeOptions(quiet=True, write_model_card=False))
    return output


def main(golden: str) -> None:
    """Merge every configuration, and write the tensors and what the config.json says of layers and dtype."""
    target, tensors, facts = Path(golden).resolve(), {}, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        os.chdir(folder)
        for config in CONFIGS:
            output = merged(config, folder)
            tensors |= {f"{config}|{key}": t for key, t in load_file(output / "model.safetensors").items()}
            content = json.loads((output / "config.json").read_text())
            facts[config] = {"num_hidden_layers": content["num_hidden_layers"]}
    about = {"oracle": f"mergekit {importlib.metadata.version('mergekit')}", "configs": json.dumps(facts)}
    save_file(tensors, target, metadata=about)
    sys.stdout.write(f"{len(CONFIGS)} configurations, {target.stat().st_size:,} bytes in {target}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
