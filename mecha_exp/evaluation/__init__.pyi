"""What `__init__.py` loads on first use."""

from .context import Context as Context
from .declaration import Evaluator as Evaluator
from .learning.registry import logits_of as logits_of
from .learning.registry import loss as loss
from .measurement import NORMALISED as NORMALISED
from .measurement import Measurement as Measurement
from .outcomes import Outcomes as Outcomes
from .registry import all_evaluators as all_evaluators
from .registry import evaluator as evaluator
from .registry import find_evaluator as find_evaluator
from .scoring import Evaluation as Evaluation
from .scoring import Scoring as Scoring
from .scoring import nan_warning as nan_warning
from .settings import read_scoring as read_scoring
from .settings import wants_weight_stats as wants_weight_stats
