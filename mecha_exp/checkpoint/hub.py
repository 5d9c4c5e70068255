"""Models of the Hugging Face hub by their names, through the cache that its library keeps."""

from __future__ import annotations

import re
from pathlib import Path

from mecha_exp.checkpoint.formats import FORMATS, INDEX, SUFFIXES
from mecha_exp.errors import CheckpointError

_NAME = re.compile(r"(?P<repository>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?")
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "LICENSE*")
_WEIGHTS = tuple(known.suffixes[0] for known in FORMATS)


def is_hub_name(name: str) -> bool:
    """Whether a name may be that of a model on the hub: `org/name`, or `org/name@revision`."""
    return bool(_NAME.fullmatch(name)) and not name.endswith((*SUFFIXES, INDEX))


def hub_folder(name: str) -> Path:
    """The folder of a model of the hub in the local cache, downloaded first where it is not there.

    Safetensors are preferred; a model that has none is taken with its pickles.

    Raises:
        CheckpointError: the library is not installed, there is no such model, or it is not in the cache and
            the hub cannot be reached.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"'{name}' is no name of a model on the hub: expected org/name.")
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise CheckpointError(
            f"'{name}' is no file here. If it is a model of the Hugging Face hub, install the library that "
            "fetches it: pip install 'mecha_exp[hub]'."
        ) from None
    try:
        for suffix in _WEIGHTS:
            folder = Path(
                huggingface_hub.snapshot_download(
                    match["repository"],
                    revision=match["revision"],
                    allow_patterns=[f"*{suffix}", *_SMALL_FILES],
                )
            )
            if any(file.suffix in _WEIGHTS for file in folder.rglob("*")):
                return folder
    except Exception as error:  # the library raises those of its transport too
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"'{name}' is no file here, is not in the cache of the Hugging Face hub, and cannot be fetched: "
            f"{cause}"
        ) from None
    raise CheckpointError(f"'{name}' of the Hugging Face hub has no weights that can be read.")
