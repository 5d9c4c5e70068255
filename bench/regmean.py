"""Peak memory and time of RegMean on two models of 0.5 GB with Gram matrices of 0.5 GB each.

    python -m bench.regmean --folder /tmp/regmean --save

The layers are those of a language model: matrices of 1,280 inputs, some of 5,120, and an embedding without a
Gram matrix. The merge runs as a user's would, in a process of its own that reads and writes files.
"""

from __future__ import annotations

from pathlib import Path

from bench.models import write_model
from bench.programs import run_program
from bench.report import machine, make_parser, publish, table
from bench.statistics_files import make_statistics

SHAPES: dict[tuple[int, ...], int] = {(1280, 5120): 3, (5120, 1280): 28, (40960, 1280): 1}
MERGE = """\
import sys
import mecha_exp as m
models, statistics = sys.argv[2:4], sys.argv[4:6]
recipe = m.regmean(*models, statistics=m.statistics(*statistics, kind="gram"))
m.merge(recipe, "merged.safetensors", options=m.EngineOptions(workers=int(sys.argv[1])))
"""


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of models, which stay there")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    models = [options.folder.resolve() / f"{name}.safetensors" for name in "ab"]
    for number, model in enumerate(models):
        if not model.exists():
            write_model(model, SHAPES, number)
    statistics = make_statistics(models, "gram")
    sizes = [sum(path.stat().st_size for path in paths) / 2e9 for paths in (models, statistics)]
    rows = [["workers", "seconds", "CPU time", "peak memory"]]
    for workers in options.workers:
        rows.append(
            [str(workers), *run_program(options.folder, MERGE, str(workers), *map(str, models + statistics))]
        )
    text = (
        f"Models of {sizes[0]:.2f} GB, Gram matrices of {sizes[1]:.2f} GB.\n\n{table(rows)}\n\n{machine()}."
    )
    publish("RegMean of two models (0.5 GB)", text, save=options.save)


if __name__ == "__main__":
    main()
