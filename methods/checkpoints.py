"""Checkpoints of one training run, the oldest first: means in place of a decaying learning rate."""

from itertools import pairwise

from torch import Tensor

from mecha_exp import Parameter, RecipeError, Return, merge_method
from mecha_exp.extensions.merge_methods import counted
from mecha_exp.methods.linear import n_average, weighted_sum, weighted_total
from mecha_exp.methods.parameters import Alpha, Base, Model, Weight


@merge_method(composite=True, title="WiSE-FT")
def wise_ft(base: Base, tuned: Weight, alpha: Alpha = 0.5) -> Return(Tensor, "weight"):
    """(1 - alpha) base + alpha tuned: a fine-tuned model held back to what it was made from.

    `weighted_sum` by the paper's name: zero-shot and fine-tuned weights, which are robust between.
    Agrees: the official code.
    Source: WiSE-FT, Wortsman et al. 2021, arXiv:2109.01903.
    """
    return weighted_sum(base, tuned, alpha=alpha)


@merge_method(composite=True, title="LAWA")
def lawa(
    *models: Model,
    last: Parameter(int, ge=0, help="how many of the last checkpoints are averaged; 0 is all") = 0,
) -> Return(Tensor):
    """The mean of the `last` models, checkpoints of one run with the oldest first.

    Agrees: the paper's formula.
    Source: LAWA, Kaddour 2022, arXiv:2209.14981.
    """
    if last > len(models):
        raise RecipeError(
            f"last: {last} checkpoints are asked for, and {counted(len(models), 'is', 'are')} given"
        )
    return n_average(*models[-last:])


@merge_method(composite=True, title="EMA")
def ema(
    *models: Model,
    decay: Parameter(float, ge=0, le=1, help="how much of the mean so far each checkpoint keeps") = 0.9,
) -> Return(Tensor):
    """m_N of m_1 = model_1, m_i = decay m_(i - 1) + (1 - decay) model_i, the oldest checkpoint first.

    decay 0 is the last checkpoint, 1 the first.
    Agrees: the usual update of an exponential moving average, from checkpoints in place of steps.
    Source: Polyak & Juditsky 1992; as in torch's swa_utils.
    """
    weights = [1.0]
    for _ in models[1:]:
        weights = [decay * weight for weight in weights] + [1 - decay]
    return weighted_total(*models, weights=weights)


@merge_method(composite=True)
def wsm(
    *models: Model,
    decay: Parameter(
        list[float],
        ge=0,
        le=1,
        help="the learning rate that each checkpoint but the first was to be trained with, over the constant "
        "one: falling numbers, or one for all",
    ),
) -> Return(Tensor):
    """sum_j c_j model_j, which is what training with a decaying learning rate would have made of the run.

    Of models 0 to k, the oldest first, c_0 = 1 - w_1, c_j = w_j - w_(j + 1) and c_k = w_k, w being the decay.
    Falling linearly, w_i = 1 - i / (k + 1), it is the mean: `lawa`.
    Agrees: the paper's theorem.
    Differs: the paper's named schedules (cosine, square root) are not offered by name: give their values.
    Source: WSM, Tian et al. 2025, arXiv:2507.17634.
    """
    steps = len(models) - 1
    falling = [float(decay)] * steps if isinstance(decay, int | float) else [float(w) for w in decay]
    if len(falling) != steps:
        raise RecipeError(
            f"decay: {counted(len(falling), 'number is', 'numbers are')} given for "
            f"{counted(len(models), 'checkpoint')}. Give one, or {steps}: "
            "none for the first checkpoint."
        )
    rates = [1.0, *falling, 0.0]
    if rates != sorted(rates, reverse=True):
        raise RecipeError(f"decay: {falling} rises. A learning rate that decays only falls.")
    return weighted_total(*models, weights=[a - b for a, b in pairwise(rates)])
