"""The environment of a result: the names of its inputs, the commit, the versions of packages."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from mecha_exp._version import __version__
from mecha_exp.checkpoint import INDEX
from mecha_exp.checkpoint.hub import in_hub_cache
from mecha_exp.checkpoint.remote import address_of
from mecha_exp.checkpoint.remote.address import parse_hub, scheme_of
from mecha_exp.graph.nodes import ModelNode
from mecha_exp.runs.record import CHANGES_FILE, CHECKOUT_CHANGES_FILE
from mecha_exp.system.machine import installed, machine

PACKAGES = ("torch", "numpy", "safetensors", "hydra-core", "omegaconf", "mlflow")


_LARGEST_DIFF = 1_000_000
_GIT_ERRORS = (OSError, subprocess.SubprocessError)
_GIT_SECONDS = 10
_NO_PROGRAMS = (
    *("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "-c", "diff.external="),
    *("-c", "core.pager=cat", "-c", "core.alternateRefsCommand=", "-c", "core.sshCommand=false"),
)
_AS_TEXT = ("--no-color", "--no-ext-diff", "--no-textconv")
_NOT_INSIDE = "--ignore-submodules=dirty"
"""A submodule has a configuration of its own."""


def environment() -> dict[str, str]:
    """The commit, the versions and the machine that a result was made with."""
    versions = {"mecha_exp": __version__, "python": platform.python_version(), **installed(*PACKAGES)}
    return {**git_state(), **{f"version/{name}": version for name, version in versions.items()}, **machine()}


def input_names(files: Mapping[ModelNode, Path]) -> dict[ModelNode, str]:
    """A short name for each input: its file's, that on the hub, or its folder's where several have the same.

    A model of the hub is `org/name`, and two states of one `org/name_COMMIT`, with its first 8 digits.
    """
    choices = [names_of_input(path) for path in files.values()]
    names: dict[ModelNode, str] = {}
    for model, (short, longer) in zip(files, choices, strict=True):
        name = short if [first for first, _ in choices].count(short) == 1 else longer
        namesakes = list(names.values()).count(name)
        names[model] = f"{name}_{namesakes + 1}" if namesakes else name
    return names


def names_of_input(path: Path) -> tuple[str, str]:
    """The name of a file without suffix, or of a folder or a model on the hub, and one that says more.

    A shard index is named by its folder.
    """
    if not path.is_dir() and not path.name.endswith(INDEX):
        return path.stem, names_of_input(path.absolute().parent)[0]
    folder = path.absolute() if path.is_dir() else path.absolute().parent
    address = address_of(folder) or ""
    if scheme_of(address) == "hf" and not (hub := parse_hub(address)).file:
        return hub.repository, f"{hub.repository}_{hub.revision}" if hub.revision else hub.repository
    if (cached := in_hub_cache(folder)) and not cached.inside:
        return cached.repository, f"{cached.repository}_{cached.commit[:8]}"
    return folder.name, folder.parent.name


@functools.cache
def git_state() -> dict[str, str]:
    """The commits that were used and whether there were changes on top of them.

    `git/commit` and `git/dirty` are of the current folder's repository; `git/mecha_exp/commit` and
    `git/mecha_exp/dirty` of the checkout that this package runs from, where that is another one. Outside a
    repository the first two are of the checkout; nothing where neither is under git. A submodule has changed
    where its commit has: what is not committed inside of it is not looked for.
    """
    state: dict[str, str] = {}
    for name, folder in _repositories().items():
        with contextlib.suppress(*_GIT_ERRORS):
            commit, changes = (
                _git(folder, "rev-parse", "HEAD"),
                _git(folder, "status", "--porcelain", _NOT_INSIDE),
            )
            state |= {f"git/{name}commit": commit, f"git/{name}dirty": str(bool(changes)).lower()}
    return state


@functools.cache
def git_changes() -> dict[str, str]:
    """The uncommitted changes by the name of their file in a run's folder; empty where nothing has changed.

    A file is a diff on top of a commit of `git_state`. Untracked files are named; those of mecha_exp's own
    checkout that are Python or YAML are part of the diff, since they may be the method that was merged with.
    """
    files = {CHANGES_FILE: "", CHECKOUT_CHANGES_FILE: ""}
    for name, folder in _repositories().items():
        with contextlib.suppress(*_GIT_ERRORS):
            file = CHECKOUT_CHANGES_FILE if name else CHANGES_FILE
            files[file] = _changes(folder, with_new_files=folder == _checkout())
    return files


def _changes(folder: Path, *, with_new_files: bool) -> str:
    """The diff of a repository to its commit, after the names of its untracked files."""
    kind = "all" if with_new_files else "normal"
    status = _git(folder, "status", "--porcelain", _NOT_INSIDE, f"--untracked-files={kind}")
    untracked = [line[3:] for line in status.splitlines() if line.startswith("??")]
    added = [name for name in untracked if with_new_files and name.endswith((".py", ".yaml", ".yml"))]
    diffs = [
        _git(folder, "diff", "HEAD", *_AS_TEXT, _NOT_INSIDE),
        *(_new_file(folder, n) for n in added),
    ]
    diff = "\n".join(filter(None, diffs))
    if len(diff) > _LARGEST_DIFF:
        diff = f"{diff[:_LARGEST_DIFF]}\n# ... cut after {_LARGEST_DIFF:,} of {len(diff):,} characters"
    names = [f"# untracked: {name}" for name in untracked if name not in added]
    return "\n".join([*names, diff, ""]) if names or diff else ""


def _new_file(folder: Path, name: str) -> str:
    """An untracked file as a diff that `git apply` understands."""
    return _git(folder, "diff", *_AS_TEXT, "--no-index", "--", os.devnull, name, status=1)  # the two differ


@functools.cache
def _repositories() -> dict[str, Path]:
    """The repositories that have a part in a result, by the beginning of the names of their tags."""
    own, checkout = _top_of(Path.cwd()), _checkout()
    if own is None or checkout in (None, own):
        return {"": repository} if (repository := own or checkout) else {}
    return {"": own, "mecha_exp/": checkout}


@functools.cache
def _checkout() -> Path | None:
    """The repository that has this package under version control; None where it was installed."""
    package = Path(__file__).parents[1]
    try:
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
    except _GIT_ERRORS:
        return None
    return _top_of(package)


def _top_of(folder: Path) -> Path | None:
    """The top folder of the repository that a folder is in; None outside one, or without git."""
    try:
        return Path(_git(folder, "rev-parse", "--show-toplevel"))
    except _GIT_ERRORS:
        return None


def _git(folder: Path, *arguments: str, status: int = 0) -> str:
    """What git says of a repository, of which no program runs: its configuration may be another's.

    Raises:
        OSError, SubprocessError: git is missing, gives another status, takes too long, or cannot be kept from
            running a program.
    """
    return _run_git(folder, [*_NO_PROGRAMS, *_no_filters(folder)], arguments, status)


@functools.cache
def _no_filters(folder: Path) -> tuple[str, ...]:
    """Settings that switch off the filters that a repository itself defines; those of the user stay."""
    words = ("config", "--show-scope", "--null", "--name-only", "--get-regexp", r"^filter\.")
    listed = _run_git(folder, _NO_PROGRAMS, words, None).split("\0")
    pairs = zip(listed[::2], listed[1::2], strict=False)
    own = [key for scope, key in pairs if scope not in ("system", "global")]
    if any("=" in key for key in own):
        raise subprocess.SubprocessError("a filter's name has a sign that ends a name on a command line")
    off = [f"{key}={'false' if key.endswith('.required') else ''}" for key in own]
    return tuple(itertools.chain.from_iterable(("-c", setting) for setting in off))


def _run_git(folder: Path, settings: Sequence[str], words: Sequence[str], status: int | None) -> str:
    command = ["git", "--no-pager", "--no-optional-locks", *settings, "-C", str(folder), *words]
    environment = {**os.environ, "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_GIT_SECONDS, env=environment
    )
    if status is not None and done.returncode != status:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout.strip()
