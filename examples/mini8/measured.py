"""Statistics of the experts on images that they were trained on, for merging with data.

They are what `python -m mecha_exp calibrate` writes, made when a merge first asks for them.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

KINDS: dict[str, tuple[str, ...]] = {
    "statistics": ("kind=fisher,gram", "count=250"),
    "mask": ("kind=mask", "base=made://mini8/base.safetensors", "count=100", "rate=1e7"),
}
"""The settings of `calibrate` by the word before the suffix of a file."""


def measure(kind: str, seed: int, task: str, path: Path) -> None:
    """Write the statistics, or the mask, of the expert of a seed and a task."""
    from mecha_exp.calibration.seams.calibrate import main  # which looks up the expert in this package

    path.parent.mkdir(parents=True, exist_ok=True)
    expert = f"made://mini8/seed{seed}/{task}.safetensors"
    with TemporaryDirectory(prefix=".measured-", dir=path.parent) as folder:  # not that of another process
        output = Path(folder, path.name)
        main([expert, "module=mini8", f"data={task}", *KINDS[kind], f"output={output}"])
        if not path.exists():
            output.replace(path)
