"""Uploads to a hub: the real client of huggingface_hub, and a server here that speaks its protocol."""

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp import merge, weighted_sum
from mecha_exp.errors import CheckpointError, ConfigError
from mecha_exp.publishing.push import Upload


@dataclass
class Hub:
    """What a hub was told."""

    address: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    commits: list[tuple[str, str]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    refuses: bool = False


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    """A server of the few endpoints that an upload uses, as the client of huggingface_hub calls them."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                chunks = []
                while size := int(self.rfile.readline(), 16):
                    chunks.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(chunks)
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _answer(self, content: object, status: int = 200) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_PUT(self) -> None:
            hub.large[self.path.rpartition("/")[2]] = self._body()
            self._answer({})

        def do_POST(self) -> None:
            path, body = self.path.partition("?")[0], self._body()
            hub.requests.append(path)
            if hub.refuses:
                self._answer({"error": "You have no right to create this model."}, 403)
            elif path == "/api/repos/create":
                hub.created.append(json.loads(body))
                self._answer({"url": f"{hub.address}/me/merged"})
            elif "/preupload/" in path:
                files = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(body)["files"]
                ]
                self._answer({"files": files})
            elif path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {**o, "actions": {"upload": {"href": f"{hub.address}/put/{o['oid']}"}}}
                    for o in json.loads(body)["objects"]
                ]
                self._answer({"transfer": "basic", "objects": objects})
            elif "/commit/" in path:
                self._commit(path, [json.loads(line) for line in body.splitlines()])
            else:  # the check of the front matter
                self._answer({"errors": [], "warnings": []})

        def _commit(self, path: str, lines: list[dict[str, Any]]) -> None:
            for line in lines:
                value = line["value"]
                if line["key"] == "header":
                    hub.commits.append((path.rpartition("/")[2], value["summary"]))
                elif line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.large[value["oid"]]
            self._answer({"commitUrl": f"{hub.address}/me/merged/commit/1", "commitOid": "1"})

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, to which processes that are started now upload."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name, value in {
        "HF_ENDPOINT": hub.address,
        "HF_TOKEN": "hf_of_a_test",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0",
    }.items():
        monkeypatch.setenv(name, value)
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a merged model, with its card."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        (tmp_path / name).mkdir()
        save_file({"layer.weight": torch.randn(64, 30)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"model_type": "tiny"}')
    return merge(weighted_sum("a", "b", alpha=0.3), "merged")


def visibility(hub: Hub) -> str:
    """Who may see the repository that was made; older clients say it by `private`."""
    asked = hub.created[0]
    return str(asked.get("visibility") or ("private" if asked["private"] else "public"))


def test_an_upload_is_shown_and_not_done(merged: Path, hub: Hub, app):
    outcome = app("push", "merged", "me/merged", cwd=merged.absolute().parent)

    assert outcome.status == 0, outcome.err
    for name in ("README.md", "config.json", "model.safetensors"):
        assert re.search(rf"{re.escape(name)}\s+[\d.]+ k?B", outcome.out)
    assert "to me/merged (private, if it is new): 3 files" in outcome.out
    assert "commit: Merge of a and b by Weighted sum\n" in outcome.out
    assert "Nothing was uploaded. The same command with --yes uploads it." in outcome.out
    assert hub.requests == []


@pytest.mark.libraries
def test_what_is_uploaded_is_what_lies_there(merged: Path, hub: Hub, as_a_user):
    (merged / ".cache").mkdir()
    (merged / ".cache" / "secret").write_text("x")

    outcome = as_a_user("push", "merged", "me/merged", "--yes", cwd=merged.absolute().parent)

    assert outcome.status == 0, outcome.err
    assert f"{hub.address}/me/merged/commit/1" in outcome.out
    assert hub.files == {file.name: file.read_bytes() for file in merged.iterdir() if file.is_file()}
    weights = (merged / "model.safetensors").read_bytes()
    assert hub.large == {hashlib.sha256(weights).hexdigest(): weights}
    assert hub.commits == [("main", "Merge of a and b by Weighted sum")]
    assert (hub.created[0]["organization"], hub.created[0]["name"]) == ("me", "merged")
    assert visibility(hub) == "private"


@pytest.mark.libraries
def test_message_branch_and_visibility_are_those_that_are_asked_for(merged: Path, hub: Hub, as_a_user):
    words = ("--public", "-m", "Second try", "--revision", "next", "--yes")

    outcome = as_a_user("push", "merged", "me/merged", *words, cwd=merged.absolute().parent)

    assert outcome.status == 0, outcome.err
    assert hub.commits == [("next", "Second try")]
    assert visibility(hub) == "public"


@pytest.mark.libraries
def test_a_hub_that_refuses_is_an_error_in_a_sentence(merged: Path, hub: Hub, as_a_user):
    hub.refuses = True

    outcome = as_a_user("push", "merged", "me/merged", "--yes", cwd=merged.absolute().parent)

    assert outcome.status == 1
    assert "merged was not uploaded to me/merged: " in outcome.err
    assert "Traceback" not in outcome.err and "hf_of_a_test" not in outcome.err + outcome.out


def test_a_folder_without_a_card_is_refused(merged: Path):
    (merged / "README.md").unlink()

    with pytest.raises(CheckpointError, match=r"merged has no model card\. Merge without output\.card=false"):
        Upload.of(merged, "me/merged")


def test_a_partial_merge_is_refused(merged: Path):
    (merged.parent / ".merged.mecha-partial").mkdir()

    with pytest.raises(CheckpointError, match=r"a merge into merged was not finished\. Run its"):
        Upload.of(merged, "me/merged")


def test_a_damaged_model_is_refused(merged: Path):
    os.truncate(merged / "model.safetensors", 100)

    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Upload.of(merged, "me/merged")


def test_a_link_out_of_the_folder_is_refused(merged: Path):
    (merged / "notes.txt").symlink_to(merged.absolute().parent / "a" / "config.json")

    with pytest.raises(CheckpointError, match=r"notes\.txt lead out of the folder"):
        Upload.of(merged, "me/merged")


@pytest.mark.parametrize("target", ["a", "merged/inner", "nowhere"])
def test_a_link_to_a_folder_or_to_nothing_is_refused(target: str, merged: Path):
    (merged / "inner").mkdir()
    (merged / "vae").symlink_to(merged.absolute().parent / target)

    with pytest.raises(CheckpointError, match=r"vae lead out of the folder, to a folder, or nowhere\. Put"):
        Upload.of(merged, "me/merged")


@pytest.mark.parametrize("name", ["merged", "a/b/c", "../x", ""])
def test_a_repository_is_named_by_its_owner_and_its_name(name: str, merged: Path):
    with pytest.raises(ConfigError, match=r"is not the name of a repository: expected org/name"):
        Upload.of(merged, name)


def test_a_file_is_refused(merged: Path):
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a folder: merge into a folder"):
        Upload.of(merged / "model.safetensors", "me/merged")
