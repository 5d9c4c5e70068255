"""The header of a file of statistics: the model, the data and the settings that they are of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mecha_exp.documents import DocumentError, parse_json, typed
from mecha_exp.errors import CheckpointError

if TYPE_CHECKING:
    from mecha_exp.sources.source import Source

METADATA = "mecha_exp.statistics"
"""The entry of a file's header that tells what the statistics are of."""

FISHER, GRAM, MEAN, NORM, GRADIENT = "fisher", "gram", "mean", "norm", "gradient"
ACTIVATIONS, MASK = "activations", "mask"
OF_ENTRIES = (FISHER, MASK)
"""The kinds with a value for each entry of the model."""

BASE_FINGERPRINT = "base_fingerprint"
"""The setting that tells the model which an expert was fine-tuned from; see `fingerprint`."""

EXPERT_FINGERPRINT, SCALE = "expert_fingerprint", "scale"
"""The settings of statistics of base + scale (expert - base): which expert, and the scale."""

MERGED_FINGERPRINTS, ALPHA = "merged_fingerprints", "alpha"
"""The settings of Gram matrices along a merge: which models are merged by RegMean++, and its alpha."""

INPUTS_FIRST = " (inputs first)"
"""The end of a key of a Gram matrix whose layer has the inputs on the first axis of its weight."""

FEW_EXAMPLES = 100
"""Statistics of fewer examples than this are worth a warning."""

_SAMPLED = 1 << 10  # bytes at both ends of each tensor


@dataclass(frozen=True)
class StatisticsHeader:
    """The model, the data and the settings that statistics are of.

    Attributes:
        model: the path of the model.
        model_sha256: of its files.
        fingerprint: see `fingerprint`.
        data: the path or the name of the data.
        data_sha256: of its files; empty where a name stands for it.
        count: how many examples.
        seed: of the labels and positions that were sampled.
        labels: for gradients `sampled`, `true` or `exact`.
        kinds: of statistics.
        rows: for each Gram matrix how many rows of inputs are in it; for `activations/KEY` from how many
            rows they were drawn.
        unmeasured: for each kind the keys of the model without it, each with its dtype and shape.
        settings: what else decides the numbers.
        code: the version of mecha_exp and a hash of what computed them.
    """

    model: str
    model_sha256: str
    fingerprint: str
    data: str
    data_sha256: str
    count: int
    seed: int
    labels: str
    kinds: tuple[str, ...]
    rows: Mapping[str, int] = field(default_factory=dict)
    unmeasured: Mapping[str, Mapping[str, tuple[str, list[int]]]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""

    def metadata(self) -> dict[str, str]:
        """The header of the file."""
        return {METADATA: json.dumps(asdict(self))}

    @staticmethod
    def of(source: Source) -> StatisticsHeader:
        """The header of an opened file.

        Raises:
            CheckpointError: it does not hold statistics.
        """
        try:
            return typed(parse_json(source.metadata[METADATA]), StatisticsHeader)
        except KeyError:
            raise CheckpointError(
                f"{source.name} does not hold statistics of a model on data. Make them: python -m mecha_exp "
                "calibrate MODEL data=FILE kind=fisher,gram output=FILE.safetensors"
            ) from None
        except DocumentError as error:
            raise CheckpointError(
                f"{source.name}: its header of statistics cannot be read: {error}"
            ) from None


def fingerprint(source: Source) -> str:
    """A hash of a model's keys, dtypes and shapes, and of the first and last KiB of each tensor.

    It tells models apart without reading them; the whole content is hashed by `calibrate` and by signatures.
    """
    digest = hashlib.sha256()
    for key in sorted(source.keys()):
        info = source.info(key)
        digest.update(json.dumps([key, info.dtype, list(info.shape)]).encode())
        for start in dict.fromkeys((0, max(info.nbytes - _SAMPLED, 0))):
            part = bytearray(min(_SAMPLED, info.nbytes - start))
            if part:
                source.read_bytes_into(key, start, memoryview(part))
            digest.update(part)
    return digest.hexdigest()
