"""A sweep as one archive for a reviewer, and the way back, which trusts nothing in it.

README.md         what it is, and the commands that make the sweep again
SHA256SUMS        of every other file, for `sha256sum --check`
bundle.json       title, command, versions, and the inputs with their contents
references.bib    the papers of the methods
sweep/            its folder without models: configurations, recipes, records, outcomes, plugins, report

Models are not in it: inputs are found by their contents, and results are made again.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from mecha_exp.errors import ConfigError, brief, counted
from mecha_exp.runs.citations import cited, methods_in
from mecha_exp.runs.record import Record, json_ready, read_recipe
from mecha_exp.runs.sweep import SWEEP_FILE, Sweep
from mecha_exp.system.atomic_write import atomic_write
from mecha_exp.system.texts import markdown_block, markdown_code, markdown_table, markdown_text

SWEEP, SUMS, ABOUT, README, REFERENCES = (
    "sweep",
    "SHA256SUMS",
    "bundle.json",
    "README.md",
    "references.bib",
)
KEPT = (".json", ".csv", ".parquet", ".yaml", ".mecha", ".diff", ".html", ".png", ".md")
"""The suffixes of the files that a bundle has of a sweep's folder."""
MOST_FILES, MOST_BYTES = 1_000_000, 4 << 30
"""What is unpacked at most; a bundle of 1,000 points has some 100 MB."""
_MODEL = "model"
_DAMAGE = (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError, OSError, ValueError)
"""What damaged archives raise."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_PART = 1 << 20


def write_bundle(sweep: Sweep, folder: Path, target: Path) -> dict[str, int]:
    """Write the archive of a sweep; the same sweep gives the same bytes.

    Args:
        sweep: the data that its points share.
        folder: of the sweep.
        target: the archive, a `.zip` file.

    Returns:
        How many files it has, and how many bytes these are.

    Raises:
        ConfigError: the sweep has no finished point, or runs still.
    """
    records = sweep.all_records(folder)
    finished = [record for record in records.values() if record.finished]
    if not finished or sweep.underway:
        raise ConfigError(f"{folder} has not ended: bundle it when its command has come to its end.")
    contents: dict[str, bytes | Path] = {
        f"{SWEEP}/{path.relative_to(folder).as_posix()}": path for path in _kept(folder)
    }
    contents |= {name: text.encode() for name, text in _texts(sweep, records).items()}
    sums = "".join(f"{_hash(contents[name])}  {name}\n" for name in sorted(contents))
    contents[SUMS] = sums.encode()
    with atomic_write(target) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name in sorted(contents):
            _write(archive, name, contents[name])
    sizes = [len(c) if isinstance(c, bytes) else c.stat().st_size for c in contents.values()]
    return {"files": len(sizes), "bytes": sum(sizes)}


def _kept(folder: Path) -> Iterator[Path]:
    """The files of a sweep's folder without models, in order; links are left out."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        is_of_model = any(Path(part).stem == _MODEL for part in parts)
        if path.suffix in KEPT and not is_of_model and path.is_file() and not path.is_symlink():
            yield path


def _texts(sweep: Sweep, records: Mapping[Path, Record]) -> dict[str, str]:
    """The files of a bundle beside those of the sweep."""
    methods = [name for path in records for name in methods_in(read_recipe(path))]
    entries, _ = cited(dict.fromkeys(methods), [sweep.mode])
    about = {
        "title": sweep.title,
        "command": sweep.command,
        "points": {path.name: record.name for path, record in records.items()},
        "versions": next(record.environment for record in records.values() if record.finished),
        "inputs": _inputs(records.values()),
    }
    data = json.dumps(json_ready(about, repr), indent=2, ensure_ascii=False)
    references = "\n".join(entry.text for entry in entries)
    return {ABOUT: data, REFERENCES: references, README: _readme(about)}


def _inputs(records: Any) -> dict[str, dict[str, str]]:
    """The name of the file and the SHA-256 of each input, by its name."""
    return {
        name: {"file": Path(path).name, "sha256": record.tags.get(f"fingerprint/{name}", "unknown")}
        for record in records
        for name, path in record.inputs.items()
    }


def _readme(about: Mapping[str, Any]) -> str:
    versions = about["versions"]
    named = [f"{name} {versions[f'version/{name}']}" for name in ("mecha_exp", "torch", "numpy")]
    inputs = [
        [markdown_text(name), markdown_code(of["file"]), markdown_code(of["sha256"])]
        for name, of in about["inputs"].items()
    ]
    return "\n".join(
        [
            f"# {markdown_text(about['title'])}",
            "",
            f"A sweep of {counted(len(about['points']), 'point')}, made with {', '.join(named)}:",
            "",
            markdown_block(shlex.join(about["command"]), "sh").rstrip(),
            "",
            "`sweep/report.html` shows the results, `sweep/verdict.json` has them for programs, and",
            "`references.bib` names the papers of the methods. `sha256sum --check SHA256SUMS` checks all.",
            "",
            "## Make it again",
            "",
            "Install these versions, put the inputs into a folder, under any names, and type:",
            "",
            "```sh",
            "python -m mecha_exp reproduce THIS_FILE.zip --models-dir FOLDER",
            "python -m mecha_exp reproduce THIS_FILE.zip --models-dir FOLDER --point 0",
            "```",
            "",
            "It merges every point, or one, again, and says which bytes, or which numbers, are equal.",
            "",
            markdown_table([["input", "file", "SHA-256"], *inputs]),
            "",
        ]
    )


def _hash(content: bytes | Path) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    digest = hashlib.sha256()
    with content.open("rb") as file:
        while part := file.read(_PART):
            digest.update(part)
    return digest.hexdigest()


def _write(archive: zipfile.ZipFile, name: str, content: bytes | Path) -> None:
    """Add a file, compressed, with a time that says nothing."""
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
    data = content if isinstance(content, bytes) else content.read_bytes()
    archive.writestr(info, data)


def is_bundle(path: Path) -> bool:
    """Whether a word names an archive of a sweep, by its suffix."""
    return path.suffix == ".zip" and path.is_file()


def unpack(path: Path, target: Path) -> Path:
    """Unpack an archive into an empty folder; returns the folder of the sweep.

    Every name is checked before the first byte is written, and every file by its SHA-256.

    Raises:
        ConfigError: it is not such an archive, or one that could do harm: names that lead out of the folder,
            links, files that are twice in it, encrypted, too many or too large, or other than its checksums.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = _checked(archive, path)
            sums = _sums(archive, members, path)
            for name, member in members.items():
                place = target.joinpath(*PurePosixPath(name).parts)
                place.parent.mkdir(parents=True, exist_ok=True)
                digest = _extract(archive, member, place)
                if name != SUMS and digest != sums[name]:
                    raise ConfigError(f"{path}: {name} has other contents than {SUMS} says.")
    except _DAMAGE as error:
        raise ConfigError(f"{path} cannot be read as a bundle: {error}.") from None
    folder = target / SWEEP
    if not (folder / SWEEP_FILE).is_file():
        raise ConfigError(f"{path} is not a bundle of a sweep: there is no {SWEEP}/{SWEEP_FILE} in it.")
    return folder


def _checked(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """The members by name, none of which can do harm."""
    members: dict[str, zipfile.ZipInfo] = {}
    seen: set[str] = set()
    total = 0
    for member in archive.infolist():
        name, total = member.filename, total + member.file_size
        fault = _fault(member)
        if not fault and name.casefold() in seen:
            fault = "is twice in it"
        if fault:
            raise ConfigError(f"{path}: nothing was unpacked, since {brief(name)} {fault}.")
        seen.add(name.casefold())
        members[name] = member
    if len(members) > MOST_FILES or total > MOST_BYTES:
        raise ConfigError(
            f"{path}: nothing was unpacked, since it has {counted(len(members), 'file')} of {total:,} bytes "
            f"in all, and {MOST_FILES:,} of {MOST_BYTES:,} bytes are the most."
        )
    return members


def _fault(member: zipfile.ZipInfo) -> str:
    """Why a member is not unpacked, as a predicate; empty where it can be."""
    name, kind = member.orig_filename, stat.S_IFMT(member.external_attr >> 16)
    parts = name.split("/")
    if name != member.filename or not name.isprintable() or "\\" in name:
        return "has a name with a backslash or a letter that cannot be printed"
    if (
        PurePosixPath(name).is_absolute()
        or PureWindowsPath(name).drive
        or any(p in ("", ".", "..") for p in parts)
    ):
        return "has a name that leads out of the folder, or is not a plain path"
    if any(len(part.encode()) > 255 for part in parts) or ":" in name:
        return "has a name that file systems do not take"
    if kind not in (0, stat.S_IFREG):
        return "is not a plain file"
    if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "is encrypted, or compressed as no bundle is"
    return ""


def _sums(archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], path: Path) -> dict[str, str]:
    """The SHA-256 of each member by its name, of all but the list itself."""
    if SUMS not in members:
        raise ConfigError(f"{path} is not a bundle: there is no {SUMS} in it.")
    text = archive.read(members[SUMS]).decode("utf-8", errors="replace")
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())}
    if differing := sums.keys() ^ (members.keys() - {SUMS}):
        raise ConfigError(f"{path}: {brief(min(differing))} is in the archive or in {SUMS}, and not in both.")
    return sums


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, place: Path) -> str:
    """Write a member to a new file; returns the SHA-256 of what was written."""
    digest = hashlib.sha256()
    with archive.open(member) as source, place.open("xb") as file:
        while part := source.read(_PART):
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


def points_of(folder: Path, word: str | None) -> list[tuple[Path, Record]]:
    """The finished points of a sweep, or the one that a word names by its number or its name.

    Raises:
        ConfigError: there is no such point, or it failed.
    """
    records = Sweep.load(folder).records(folder)
    finished = [(path, record) for path, record in records.items() if record.finished]
    if word is None:
        return finished
    named = [(path, record) for path, record in finished if word in (path.name, record.name)]
    if not named:
        names = ", ".join(f"{path.name} ({record.name})" for path, record in finished[:5])
        raise ConfigError(f"--point {word}: the bundle has no such finished point. It has {names}, ...")
    return named[:1]
