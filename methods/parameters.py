"""The parameters that many methods share: one meaning and one range each."""

from collections.abc import Sequence

from torch import Tensor

from mecha_exp import Parameter, RecipeError
from mecha_exp.extensions.merge_methods import counted

Model = Parameter(Tensor)
Base = Parameter(Tensor, "weight", help="the model that the others were made from")
Weight = Parameter(Tensor, "weight")
Experts = Parameter(Tensor, ("weight", "delta"), help="fine-tuned from the base, or deltas to it")
Delta = Parameter(Tensor, "delta")
Small = Parameter(Tensor, "param")

Alpha = Parameter(Tensor, help="strength, any number: 0 is the first model")
Share = Parameter(float, ge=0, le=1, help="how much of the second model: 0 is the first, 1 the second")
Scale = Parameter(Tensor, help="strength of the merged task vector, any number: 0 is the base")
Weights = Parameter(list[float], help="of each model: one number for all, or a list of one for each")
Kept = Parameter(float, ge=0, le=1, help="fraction of each task vector that is kept, by magnitude")
Densities = Parameter(
    list[float], gt=0, le=1, help="fraction of each task vector that is kept: one for all, or a list"
)
KeptShares = Parameter(
    list[float], ge=0, le=1, help="fraction of each task vector that is kept: one for all, or a list"
)
Dropped = Parameter(float, ge=0, le=1, help="fraction of each task vector that is dropped")
Rescale = Parameter(
    str,
    choices=(True, False, "l1"),
    help="how what is kept makes up for the rest: divided by its probability, not at all, or by the L1 norm",
)
VoteBySize = Parameter(bool, help="elect the sign of the sum of the values, not of the sum of the signs")
Seed = Parameter(int | None, ge=0, help="of the random masks; none is 0")
RowNorm = Parameter(float, ge=0, help="norms of rows below it count as it; sd-mecha has 1e-6")
Task = Parameter(int, ge=0, help="which of the models is to be restored, from 0")


def check_task(task: int, models: Sequence[object]) -> None:
    """Check that a task is one of the models.

    Raises:
        RecipeError: it is not.
    """
    if task >= len(models):
        raise RecipeError(f"task: {task} is too high for {counted(len(models), 'model')}: the first one is 0")
