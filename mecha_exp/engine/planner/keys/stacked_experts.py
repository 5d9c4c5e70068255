"""Experts that lie stacked in one tensor, [experts, rows, columns]: merged one by one.

A method of matrices would take such a tensor for one matrix, and a trim would rank the entries of all experts
together. So a key that a model config marks as a stack, or that transformers names like one, is merged
expert by expert: the result is that of a checkpoint with a key for each expert. Methods that see one entry
at a time give the same either way, and take the key as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from mecha_exp.architectures import ModelConfig, resolve
from mecha_exp.architectures.keys import is_stack
from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.engine.ir.calls import Extent
from mecha_exp.engine.ir.program import Program
from mecha_exp.errors import ConfigError, counted, some
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, calls_of
from mecha_exp.method_api.method import Kind
from mecha_exp.random import uniform


class Stacks:
    """Decides which keys are merged expert by expert, and remembers them for messages.

    Attributes:
        split: the keys that are merged expert by expert.
        doubtful: the keys that look like stacks although nothing says so, where it matters.
    """

    def __init__(self, configs: ConfigInference, choice: str) -> None:
        self.split: dict[str, None] = {}
        self.doubtful: dict[str, None] = {}
        self._configs = configs
        self._choice = choice
        self._config_of: dict[ModelNode, ModelConfig | None] = {}
        self._seen: dict[tuple[Program, tuple[Node, ...]], bool] = {}

    def experts_at(
        self,
        key: str,
        shape: tuple[int, ...],
        model: ModelNode | None,
        program: Program,
        results: Sequence[Node],
    ) -> int | None:
        """The number of experts that a program computes one by one; None where it takes the key as a whole.

        Args:
            key, shape: of the tensor.
            model: the first model that is merged there.
            program: what is computed there.
            results: the roots of the program that are merged tensors; the others are statistics.
        """
        if self._choice == "whole":
            return None
        config = self._config(model) if model else None
        splits = is_stack(key, shape, config.info_of(key) if config else None)
        splits = True if splits is None and self._choice == "split" else splits
        if splits is False or not self._sees_tensors(program, program.roots):
            return None
        if self._sees_tensors(program, tuple(results)):
            (self.doubtful if splits is None else self.split)[key] = None
        return shape[0] if splits else None

    def _sees_tensors(self, program: Program, roots: tuple[Node, ...]) -> bool:
        """As `sees_tensors`; keys of one structure share the answer."""
        if (program, roots) not in self._seen:
            self._seen[program, roots] = sees_tensors(program, roots)
        return self._seen[program, roots]

    def _config(self, model: ModelNode) -> ModelConfig | None:
        if model not in self._config_of:
            config = self._configs.only_fit(model)
            try:
                declared = resolve(model.config) if model.config else None
            except ConfigError:  # planning reports it
                declared = None
            self._config_of[model] = config or declared
        return self._config_of[model]


def sees_tensors(program: Program, roots: Sequence[Node]) -> bool:
    """Whether a call below some roots depends on more of a tensor than an entry, or on where that lies."""
    return any(_sees_more(call, program) for call in calls_of(*roots))


def _sees_more(node: MergeNode, program: Program) -> bool:
    """Whether a call does so; draws count from the beginning of the key, so that those are the same."""
    if node.method.kind is Kind.ELEMENTWISE:
        return bool(node.method.signature.wants_tile) and node.method is not uniform
    return any(program.extents[child] is not Extent.SMALL for child in node.children)


def split_notice(keys: Sequence[str]) -> str:
    """A sentence about stacks that are merged expert by expert."""
    count = counted(len(keys), "key holds several experts", "keys hold several experts each")
    return f"{count}, which are merged one by one: {some(keys, 3)}"


def doubt(keys: Sequence[str]) -> str:
    """The message about keys that look like stacks although nothing says so."""
    count = counted(len(keys), "key looks", "keys look")
    return (
        f"{count} like several experts in one tensor, and no model config says whether that is so: "
        f"{some(keys, 3)}. It matters to the recipe's methods of whole tensors, rows or ranks. "
        "stacked_experts=split merges each slice along the first axis by itself, and stacked_experts=whole "
        "each of these keys as one tensor. A model config marks such keys with 'stacked: true'."
    )
