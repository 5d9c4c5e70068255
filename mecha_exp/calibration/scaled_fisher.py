"""Fisher information of a model between a base and its expert: for DF-Merge.

Source: DF-Merge, Lee et al. 2025, arXiv:2504.18992.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mecha_exp.calibration.measurement import Advance, Request, calibrate
from mecha_exp.calibration.subject import Subject
from mecha_exp.checkpoint import StateDictSource, open_stored
from mecha_exp.checkpoint.safetensors.header import SUFFIX
from mecha_exp.engine import Job, merge_many
from mecha_exp.graph.nodes import ModelNode, call
from mecha_exp.sources.statistics.header import (
    BASE_FINGERPRINT,
    EXPERT_FINGERPRINT,
    FISHER,
    SCALE,
    StatisticsHeader,
    fingerprint,
)


def calibrate_scaled(
    base: Path,
    expert: Path,
    scale: float,
    make_subject: Callable[[StateDictSource], Subject],
    request: Request,
    output: Path,
    advance: Advance = lambda examples: None,
) -> StatisticsHeader:
    """Measure the diagonal Fisher information of base + scale (expert - base), and write it to a file.

    That model lies beside the output while it is measured. `df_merge` with the same scale merges by the file.

    Args:
        base, expert: the model, and what was fine-tuned from it.
        scale: what the task vector is multiplied by.
        make_subject: (model) -> its network, with examples of the expert's task.
        request: labels, seed and memory of the calibration, and what the header says of the data.
        output: a `.safetensors` file.
        advance: is told of progress.

    Returns:
        the header of the file.

    Raises:
        MechaError: the models cannot be merged, or as `calibrate` raises it.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".scaled-", dir=output.parent) as folder:
        path = Path(folder, f"{expert.stem}{SUFFIX}") if expert.is_file() else Path(folder, expert.name)
        recipe = call("weighted_sum", ModelNode(str(base)), ModelNode(str(expert)), alpha=scale)
        merge_many([Job(recipe, path)])
        with open_stored(path) as scaled, open_stored(base) as of_base, open_stored(expert) as of_expert:
            settings = {
                **request.settings,
                SCALE: scale,
                BASE_FINGERPRINT: fingerprint(of_base),
                EXPERT_FINGERPRINT: fingerprint(of_expert),
            }
            named = replace(
                request,
                kinds=(FISHER,),
                model=f"{base.name} + {scale} ({expert.name} - base)",
                settings=settings,
            )
            return calibrate(make_subject(scaled), scaled, named, output, advance)
