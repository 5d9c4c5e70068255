"""The public names and where they are defined. `__init__.py` reads this list and loads each on first use."""

from . import extensions as extensions
from .api import Defaults as Defaults
from .api import merge as merge
from .api import set_log_level as set_log_level
from .app.notebook import SweepPoint as SweepPoint
from .app.notebook import SweepResult as SweepResult
from .app.notebook import sweep as sweep
from .compat import RecipeMerger as RecipeMerger
from .compat import merge_and_save as merge_and_save
from .conversion.shortest_path import convert as convert
from .engine import (
    EngineOptions as EngineOptions,
)
from .engine import (
    Job as Job,
)
from .engine import (
    MergeReport as MergeReport,
)
from .engine import (
    merge_many as merge_many,
)
from .engine import (
    plan as plan,
)
from .errors import (
    CheckpointError as CheckpointError,
)
from .errors import (
    ConfigError as ConfigError,
)
from .errors import (
    EvaluationError as EvaluationError,
)
from .errors import (
    MechaError as MechaError,
)
from .errors import (
    MergeError as MergeError,
)
from .errors import (
    RecipeError as RecipeError,
)
from .evaluation import (
    Context as Context,
)
from .evaluation import (
    Measurement as Measurement,
)
from .evaluation import (
    Outcomes as Outcomes,
)
from .evaluation import evaluator as evaluator
from .evaluation import logits_of as logits_of
from .evaluation import loss as loss
from .extensions import model_dirs as model_dirs
from .graph.legacy_strengths import blocks as blocks
from .graph.legacy_strengths import classes as classes
from .graph.legacy_strengths import default as default
from .graph.literals import (
    RecipeNode as RecipeNode,
)
from .graph.literals import (
    RecipeNodeOrValue as RecipeNodeOrValue,
)
from .graph.literals import (
    literal as literal,
)
from .graph.literals import (
    model as model,
)
from .graph.literals import (
    value_to_node as value_to_node,
)
from .graph.nodes import Node as Node
from .graph.spaces import MergeSpaceSymbol as MergeSpaceSymbol
from .in_torch import eager as eager
from .in_torch import load_into as load_into
from .in_torch import merge_modules as merge_modules
from .mergekit.recipe import from_mergekit as from_mergekit
from .method_api.decorators import factor as factor
from .method_api.decorators import merge_method as merge_method
from .method_api.decorators import reduction as reduction
from .method_api.decorators import whole_model as whole_model
from .method_api.key_map import KeyMapBuilder as KeyMapBuilder
from .method_api.method import MergeMethod as MergeMethod
from .method_api.parameters import Parameter as Parameter
from .method_api.parameters import Return as Return
from .method_api.state_dict import (
    StateDict as StateDict,
)
from .method_api.state_dict import (
    StateDictKeyError as StateDictKeyError,
)
from .method_api.state_dict import (
    Tile as Tile,
)
from .method_api.state_dict import (
    skip_key as skip_key,
)
from .peft.extraction import extract_adapter as extract_adapter
from .peft.merge import merge_adapters as merge_adapters
from .random import uniform as uniform
from .recipe import (
    build_recipe as build_recipe,
)
from .recipe import (
    deserialize as deserialize,
)
from .recipe import (
    deserialize_path as deserialize_path,
)
from .recipe import (
    fill as fill,
)
from .recipe import (
    parameter as parameter,
)
from .recipe import (
    serialize as serialize,
)
from .recipe import (
    serialize_and_save as serialize_and_save,
)
from .recipe.keys import for_keys as for_keys
from .recipe.layers import stack_layers as stack_layers
from .recipe.tokens import align_tokens as align_tokens

__all__: list[str]
__version__: str

def __getattr__(name: str) -> MergeMethod:
    """A built-in merge method, or one of a plugin."""
