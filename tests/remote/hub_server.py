"""A hub on the loopback: the endpoints that the library of the Hugging Face hub uses for a model."""

import hashlib
import json
import re
from pathlib import Path

from range_server import Handler, RangeServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_INFO = re.compile(r"/api/models/(?P<name>[^/]+/[^/?]+)(/revision/(?P<revision>[^?]+))?(\?.*)?")
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class Hub:
    """Answers for the models in a folder, `org/name`, each at the revision `main` and its commit.

    Files lie on another server, as those of the hub do.

    Attributes:
        token: what a login must be; empty lets everybody read.
    """

    def __init__(self, folder: Path, storage: RangeServer) -> None:
        self.folder, self.storage, self.token = folder, storage, ""

    def answer(self, handler: Handler, number: int) -> bool:
        """Answer a request of the API, or lead one for a file to its storage; as `RangeServer.fault`."""
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            handler.send(401, b"{}", {"X-Error-Code": "GatedRepo"})
        elif match := _INFO.fullmatch(handler.path):
            self._info(handler, match["name"], match["revision"] or "main")
        elif (match := _FILE.fullmatch(handler.path)) and match["revision"] == COMMIT:
            handler.send(302, b"", {"Location": f"{self.storage.url}/{match['name']}/{match['file']}"})
        else:
            handler.send(404, b"")
        return True

    def _info(self, handler: Handler, name: str, revision: str) -> None:
        folder = self.folder / name
        if not folder.is_dir() or revision not in ("main", COMMIT):
            code = "RevisionNotFound" if folder.is_dir() else "RepoNotFound"
            handler.send(404, b'{"error": "not found"}', {"X-Error-Code": code})
            return
        siblings = [_entry(file, folder) for file in sorted(folder.rglob("*")) if file.is_file()]
        content = {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
        handler.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})


def _entry(file: Path, folder: Path) -> dict[str, object]:
    content = file.read_bytes()
    entry: dict[str, object] = {
        "rfilename": file.relative_to(folder).as_posix(),
        "size": len(content),
        "blobId": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
    }
    if file.suffix == ".safetensors":
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
    return entry
