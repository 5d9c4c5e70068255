"""Addresses of models: `hf://org/name@revision`, `s3://bucket/model.safetensors`, `https://...`."""

from __future__ import annotations

import re
from typing import NamedTuple

from mecha_exp.errors import CheckpointError

_ADDRESS = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+)://(?P<place>.+)")
_HUB = re.compile(r"hf://(?P<repository>[^/@]+/[^/@]+)(/(?P<file>[^@]*[^@/]))?/?(@(?P<revision>.+))?")
_KNOWN = "hf|s3|s3a|gs|gcs|az|abfs|https?|memory"
_AS_PATH = re.compile(rf"(?P<scheme>{_KNOWN}):[/\\](?P<place>[^/\\].*)")
_IN_PATH = re.compile(rf"(?:^|[/\\])(?P<scheme>{_KNOWN}):[/\\]+(?P<place>.*)")

OWN_SCHEMES = ("pkg", "made")
"""Schemes of models on this machine."""

NOT_IN_PARTS = {
    ".bin": "a pickle",
    ".ckpt": "a pickle",
    ".gguf": "GGUF",
    ".pt": "a pickle",
    ".pth": "a pickle",
}
"""What is read from a disk only, by suffix."""
FILE_SUFFIXES = (".safetensors", ".sft", *NOT_IN_PARTS)
HTTP = ("http", "https")
S3 = ("s3", "s3a")
GOOGLE = ("gs", "gcs")


class HubFile(NamedTuple):
    """What an address of the hub names: a repository, a file in it (empty: all), and a revision."""

    repository: str
    file: str
    revision: str | None


def is_address(path: str) -> bool:
    """Whether a model's path is the address of another place."""
    return scheme_of(path) not in ("", *OWN_SCHEMES)


def scheme_of(path: str) -> str:
    """The scheme of an address; empty for a path of this machine."""
    match = _ADDRESS.fullmatch(path)
    return match["scheme"] if match else ""


def name_of(address: str) -> str:
    """The last part of an address: the name of the file or folder."""
    plain = address.partition("?")[0] if scheme_of(address) in HTTP else address
    if scheme_of(address) == "hf":
        hub = parse_hub(address)
        plain = hub.file or hub.repository
    return re.sub(r"[^\w.-]", "_", plain.rstrip("/").rpartition("/")[2]).lstrip(".") or "model"


def parse_hub(address: str) -> HubFile:
    """The parts of `hf://org/name/file@revision`.

    Raises:
        CheckpointError: it has no such parts.
    """
    match = _HUB.fullmatch(address)
    if match is None:
        raise CheckpointError(
            f"'{address}' is not the address of a model on the hub: expected hf://org/name, "
            "hf://org/name/file, or either with @revision at its end."
        )
    return HubFile(match["repository"], match["file"] or "", match["revision"])


def address_in(path: str) -> str | None:
    """The address that became a path of this machine, such as `/here/s3:/bucket/a`; None if it is none."""
    match = _IN_PATH.search(path)
    return f"{match['scheme']}://{match['place']}" if match else None


def with_slashes(path: str) -> str:
    """The address that `pathlib` has written with one slash, `s3:/bucket/a`; any other path unchanged."""
    match = _AS_PATH.fullmatch(path)
    return f"{match['scheme']}://{match['place']}".replace("\\", "/") if match else path
