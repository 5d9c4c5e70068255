"""Peak memory and time of `calibrate` within a limit of sums, and of the statistics that belong to a merge.

    python -m bench.calibration --folder /tmp/calibration --save

The network is a stack of square linear layers, and a Gram matrix in float64 takes twice the room of a layer.
Each row is a process of its own. What a process takes before it measures is in the first row.
"""

from __future__ import annotations

from pathlib import Path

from bench.models import write_model
from bench.programs import run_program
from bench.report import machine, make_parser, publish, table

LAYERS, WIDTH = 8, 2048
SUM = 8 * WIDTH**2
"""Bytes of one layer's sums in float64."""

NETWORK = f"""\
import sys
from pathlib import Path
import torch
from torch import nn
from mecha_exp.calibration import Expert, Request, Subject, calibrate, calibrate_along_merge
from mecha_exp.checkpoint import open_stored

class Network(nn.Module):
    def __init__(self, stored):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS}))
        for layer, key in zip(self.layers, sorted(stored.keys()), strict=True):
            layer.weight = nn.Parameter(stored.read(key).float())

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

def subject_of(stored, seed):
    network = Network(stored).eval()
    keys = {{f"layers.{{i}}.weight": key for i, key in enumerate(sorted(stored.keys()))}}
    examples = torch.randn(32, 64, {WIDTH}, generator=torch.Generator().manual_seed(seed))
    return Subject(network, examples, network, keys=keys)

files = [Path(f"{{name}}.safetensors") for name in "ab"]
"""
ALONE = """
with open_stored(files[0]) as stored:
    subject = subject_of(stored, 0)
    if KIND:
        calibrate(subject, stored, Request((KIND,), memory=MEMORY), Path("out.safetensors"))
"""
ALONG = """
with open_stored(files[0]) as a, open_stored(files[1]) as b:
    outputs = [Path(f"{name}.along.safetensors") for name in "ab"]
    experts = [
        Expert(subject_of(stored, seed), stored, Request((), data="x"), output)
        for seed, (stored, output) in enumerate(zip((a, b), outputs))
    ]
    calibrate_along_merge(experts)
"""


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of models, which stay there")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate("ab"):
        model = options.folder / f"{name}.safetensors"
        if not model.exists():
            write_model(model, {(WIDTH, WIDTH): LAYERS}, number)
    works = {
        "the network alone": ALONE.replace("KIND", "''"),
        "Gram matrices, a layer at a time": _alone("gram", SUM),
        "Gram matrices, all at once": _alone("gram", 2 << 30),
        "Fisher information, a layer at a time": _alone("fisher", SUM),
        "Fisher information, all at once": _alone("fisher", 2 << 30),
        "Gram matrices of two along their merge": ALONG,
    }
    rows = [["work", "seconds", "CPU time", "peak memory"]]
    rows += [[work, *run_program(options.folder, NETWORK + code)] for work, code in works.items()]
    size = 4 * LAYERS * WIDTH**2 / 1e9
    text = (
        f"A network of {LAYERS} layers, {size:.2f} GB in float32; the sums of a layer take "
        f"{SUM / 1e9:.3f} GB. 32 examples of 64 rows.\n\n{table(rows)}\n\n{machine()}."
    )
    publish("Statistics of a model within a limit of memory", text, save=options.save)


def _alone(kind: str, memory: int) -> str:
    return ALONE.replace("KIND", repr(kind)).replace("MEMORY", str(memory))


if __name__ == "__main__":
    main()
