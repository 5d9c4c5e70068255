"""Web servers and the Hugging Face hub as stores."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mecha_exp.checkpoint.remote.address import FILE_SUFFIXES, parse_hub
from mecha_exp.checkpoint.remote.http import HttpReader, NotThere
from mecha_exp.checkpoint.remote.libraries import library
from mecha_exp.checkpoint.remote.pin import Pin, Store, cause_of
from mecha_exp.checkpoint.remote.retries import RATE_SECONDS, again, at_once, read_all
from mecha_exp.checkpoint.safetensors.header import INDEX, MAX_INDEX_BYTES
from mecha_exp.documents import parse_json
from mecha_exp.errors import CheckpointError, some
from mecha_exp.families import SMALL_FILES
from mecha_exp.system.progress import within

_WHOLE = tuple(
    f"{stem}.safetensors{end}"
    for stem in ("model", "diffusion_pytorch_model", "adapter_model")
    for end in ("", INDEX)
)
_BESIDE = tuple(sorted(SMALL_FILES))
"""Names that are asked for in a folder of a server that lists none."""


class HttpStore:
    """A web server. It lists no folders, so the usual names are asked for."""

    def __init__(self, scheme: str) -> None:
        self._reader = HttpReader(scheme)

    def files(self, address: str) -> dict[str, Pin]:
        plain, _, query = address.partition("?")
        if plain.endswith(INDEX):
            folder, _, name = plain.rpartition("/")
            return self._sharded(folder, name, self._pin(address))
        if query or plain.endswith(FILE_SUFFIXES):
            return {"": self._pin(address)}
        return self._folder(plain.rstrip("/")) or self._file_without_suffix(address)

    def read_into(self, pin: Pin, start: int, view: memoryview) -> int:
        return self._reader.read_into(pin, start, view)

    def version(self, pin: Pin) -> str:
        return self._pin(pin.address).version

    def _pin(self, address: str) -> Pin:
        return again(lambda: self._reader.look_up(address), address)

    def _folder(self, folder: str) -> dict[str, Pin]:
        present = self._present(folder, _WHOLE)
        whole = next((name for name in _WHOLE if name in present), None)
        if whole is None:
            return {}
        if whole.endswith(INDEX):
            return self._sharded(folder, whole, present[whole])
        return {whole: present[whole], **self._present(folder, _BESIDE)}

    def _file_without_suffix(self, address: str) -> dict[str, Pin]:
        """A download whose address ends as that of a folder might."""
        try:
            return {"": self._pin(address)}
        except CheckpointError:
            raise CheckpointError(
                f"{address} is not a file that can be read in ranges, and has none of {', '.join(_WHOLE)}. A "
                "web server lists no folders: name the file or the index of the model."
            ) from None

    def _sharded(self, folder: str, name: str, index: Pin) -> dict[str, Pin]:
        shards = _shards(self, index)
        pins = self._present(folder, shards)
        return {name: index, **pins, **self._present(folder, _BESIDE)}

    def _present(self, folder: str, names: Iterable[str]) -> dict[str, Pin]:
        def pin(name: str) -> Pin | None:
            try:
                return self._pin(f"{folder}/{name}")
            except NotThere:
                return None

        return {name: file_pin for name, file_pin in at_once(pin, names) if file_pin is not None}


class HubStore:
    """The Hugging Face hub: its library lists and logs in, and the revision is pinned to its commit."""

    def __init__(self) -> None:
        library("huggingface_hub")
        from huggingface_hub.utils import build_hf_headers

        self._reader = HttpReader("https", build_hf_headers())

    def files(self, address: str) -> dict[str, Pin]:
        from huggingface_hub import HfApi, hf_hub_url

        hub, endpoint = parse_hub(address), os.environ.get("HF_ENDPOINT")
        try:
            ask = HfApi(endpoint=endpoint).repo_info
            info: Any = within(
                RATE_SECONDS, lambda: ask(hub.repository, revision=hub.revision, files_metadata=True)
            )
        except Exception as error:  # the library also raises errors of its transport
            raise _of_hub(address, error) from None
        pins = {}
        for file in info.siblings or ():
            url = hf_hub_url(hub.repository, file.rfilename, revision=info.sha, endpoint=endpoint)
            where = f"hf://{hub.repository}/{file.rfilename}@{info.sha}"
            pins[file.rfilename] = Pin(where, file.size, "", file.lfs.sha256 if file.lfs else None, url)
        return _selected(pins, hub.file, address)

    def read_into(self, pin: Pin, start: int, view: memoryview) -> int:
        return self._reader.read_into(pin, start, view)

    def version(self, pin: Pin) -> str:
        return pin.version  # a commit does not change


def _of_hub(address: str, error: Exception) -> CheckpointError:
    """The error for a repository that cannot be looked up."""
    if type(error).__name__ == "OfflineModeIsEnabled":
        return CheckpointError(
            f"'{address}' is on the Hugging Face hub, and HF_HUB_OFFLINE forbids to reach it. Unset it, or "
            "name a model on this machine."
        )
    return CheckpointError(f"'{address}' cannot be looked up on the Hugging Face hub: {cause_of(error)}")


def _selected(pins: Mapping[str, Pin], file: str, address: str) -> dict[str, Pin]:
    """The files that an address of a repository means."""
    if not file:
        return dict(pins)
    if file.endswith(INDEX) and file in pins:
        folder = file.rpartition("/")[0]
        return {posixpath.relpath(n, folder or "."): p for n, p in pins.items() if n.startswith(folder)}
    if file in pins:
        return {"": pins[file]}
    inside = {n.removeprefix(f"{file}/"): p for n, p in pins.items() if n.startswith(f"{file}/")}
    if not inside:
        raise CheckpointError(f"'{address}': the repository has no '{file}'. It has {some(sorted(pins))}.")
    return inside


def _shards(store: Store, index: Pin) -> list[str]:
    """The names of the shards in an index. An index that is wrong is reported when it is opened."""
    if index.size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{index.address} has {index.size:,} bytes: this is not an index of shards.")
    content = bytearray(index.size)
    read_all(store, index, 0, memoryview(content))
    try:
        names = parse_json(content)["weight_map"].values()
        return sorted({str(name) for name in names if re.fullmatch(r"[\w.-]+", str(name))})
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
