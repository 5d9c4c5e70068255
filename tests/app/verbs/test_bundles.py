"""A sweep as one archive: it is made again in another folder, and nothing in it is trusted."""

import json
import shutil
import stat
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp.errors import ConfigError
from mecha_exp.runs import bundle
from mecha_exp.runs.bundle import SUMS, unpack

PLUGIN = '''
from mecha_exp import evaluator

@evaluator("spread", metric="spread", direction="minimize")
def spread(state_dict):
    """The spread of the first tensor."""
    return {"spread": float(next(iter(state_dict.values())).double().std())}
'''


def save(path: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({f"encoder.{n}.weight": torch.randn(4, 4) for n in range(2)}, path)
    return path


@pytest.fixture
def bundled(app: Callable, folder: Path) -> Path:
    """The archive of a sweep that kept its models, whose inputs and folder have moved since."""
    base, expert = (
        save(folder / "in puts" / "base.safetensors", 0),
        save(folder / "in puts" / "a.safetensors", 1),
    )
    words = [f"models.base='{base}'", f"models.experts=['{expert}']", "evaluator=none", "name=small"]
    outcome = app("recipe=task_arithmetic", "alpha=0.3,0.5", *words, "-m")
    assert outcome.status == 0, outcome.err
    outcome = app("bundle", "small", "--output", "to review.zip")
    assert outcome.status == 0 and "reproduce 'to review.zip'" in outcome.out, outcome.err
    (folder / "elsewhere").mkdir()
    (folder / "in puts" / "base.safetensors").rename(folder / "elsewhere" / "renamed.safetensors")
    (folder / "in puts" / "a.safetensors").rename(folder / "elsewhere" / "another.safetensors")
    shutil.rmtree(folder / "outputs")
    return folder / "to review.zip"


def test_a_sweep_is_made_again_in_another_folder_with_the_same_bytes(app, bundled):
    outcome = app("reproduce", str(bundled), "--models-dir", "elsewhere", "--json")

    assert outcome.status == 0, outcome.out + outcome.err
    made = json.loads(outcome.out)
    assert made["identical"] == 2 and [point["what"] for point in made["points"]] == [
        "alpha=0.3",
        "alpha=0.5",
    ]
    assert all("SHA-256" in point["compared"] for point in made["points"])
    assert not list(Path().glob(".reproduce-*"))


@pytest.mark.parametrize("word", ["1", "alpha=0.5"])
def test_one_point_is_made_again(app, bundled, word: str):
    outcome = app("reproduce", str(bundled), "--models-dir", "elsewhere", "--point", word)

    assert outcome.status == 0 and "1 of 1 point identical" in outcome.out
    assert "alpha=0.5, from" in outcome.out
    unknown = app("reproduce", str(bundled), "--models-dir", "elsewhere", "--point", "7")
    assert unknown.status == 1 and "has no such finished point. It has 0 (alpha=0.3)" in unknown.err


def test_another_input_is_a_difference(app, bundled, folder):
    save(folder / "elsewhere" / "another.safetensors", 5)
    (folder / "elsewhere" / "another.safetensors").rename(folder / "elsewhere" / "a.safetensors")

    outcome = app("reproduce", str(bundled), "--models-dir", "elsewhere")

    assert outcome.status == 1 and "0 of 2 points identical" in outcome.out
    assert "has changed: SHA-256 was" in outcome.out


def test_the_archive_has_what_a_reviewer_needs_and_no_model(bundled):
    with zipfile.ZipFile(bundled) as archive:
        names = set(archive.namelist())
        about = json.loads(archive.read("bundle.json"))
        readme, references = archive.read("README.md").decode(), archive.read("references.bib").decode()
        sums = archive.read(SUMS).decode().splitlines()
        contents = {name: archive.read(name) for name in names - {SUMS}}
    assert {f"sweep/{n}/{f}" for n in (0, 1) for f in ("run.json", "recipe.yaml", "recipe.mecha")} <= names
    assert not any(name.endswith(".safetensors") for name in names)
    assert about["inputs"].keys() == {"base", "a"} and about["versions"]["version/torch"]
    assert "python -m mecha_exp reproduce" in readme and about["inputs"]["a"]["sha256"] in readme
    assert "ilharco2023task" in references and "@software{mecha_exp," in references
    assert {line.partition("  ")[2] for line in sums} == contents.keys()
    for line in sums:
        digest, _, name = line.partition("  ")
        assert sha256(contents[name]).hexdigest() == digest


def test_the_same_sweep_gives_the_same_archive(app, folder):
    app("alpha=0.3,0.5", "output=none", "evaluator=none", "-m")

    for name in ("one.zip", "two.zip"):
        assert app("bundle", "--output", name).status == 0

    assert Path("one.zip").read_bytes() == Path("two.zip").read_bytes()
    refused = app("bundle", "--output", "one.tar")
    assert refused.status == 1 and "expected a .zip file" in refused.err


def test_plugins_run_only_where_they_are_allowed(app, folder, as_a_user):
    Path("spread.py").write_text(PLUGIN)
    outcome = app("alpha=0.3,0.5", "output=none", "plugins=[spread.py]", "evaluator.name=spread", "-m")
    assert outcome.status == 0, outcome.err
    assert app("bundle", "--output", "b.zip").status == 0
    Path("spread.py").unlink()

    refused = app("reproduce", "b.zip")
    allowed = as_a_user("reproduce", "b.zip", "--trust", cwd=folder)

    assert (
        refused.status == 1
        and "b.zip names what is run as code: spread.py" in refused.err
        and "--trust" in refused.err
    )
    assert allowed.status == 0 and "2 of 2 points identical" in allowed.out, allowed.out + allowed.err


def entry(name: str, mode: int = 0o644 | stat.S_IFREG) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def archive_of(path: Path, members: list[tuple[zipfile.ZipInfo, bytes]]) -> Path:
    """An archive with right checksums of whatever is in it."""
    sums = "".join(f"{sha256(content).hexdigest()}  {info.filename}\n" for info, content in members)
    with zipfile.ZipFile(path, "w") as archive:
        for info, content in [*members, (entry(SUMS), sums.encode())]:
            archive.writestr(info, content)
    return path


SWEEP = (entry("sweep/sweep.json"), b"{}")


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "sweep/../../evil",
        "/etc/evil",
        "//host/share/evil",
        "C:/evil",
        "c:evil",
        "sweep\\..\\evil",
        "sweep//evil",
        "./evil",
        "sweep/.",
        "sweep/",
        "",
        "sweep/e\nvil",
        "sweep/\u202eevil",
        "sweep/" + "x" * 300,
        "sweep/a:b",
    ],
)
def test_names_that_lead_elsewhere_are_refused_before_a_byte_is_written(tmp_path: Path, name: str):
    archive = archive_of(tmp_path / "a.zip", [SWEEP, (entry(name), b"x")])
    target = tmp_path / "in"
    target.mkdir()

    with pytest.raises(ConfigError, match="nothing was unpacked, since"):
        unpack(archive, target)

    assert not list(target.iterdir()) and {p.name for p in tmp_path.iterdir()} == {"a.zip", "in"}


@pytest.mark.parametrize(
    "mode", [stat.S_IFLNK, stat.S_IFDIR, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK, stat.S_IFBLK]
)
def test_what_is_not_a_plain_file_is_refused(tmp_path: Path, mode: int):
    archive = archive_of(tmp_path / "a.zip", [SWEEP, (entry("sweep/link", mode | 0o777), b"/etc/passwd")])

    with pytest.raises(ConfigError, match="is not a plain file"):
        unpack(archive, tmp_path / "in")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("second", ["sweep/sweep.json", "SWEEP/sweep.JSON"])
def test_a_file_that_is_twice_in_it_is_refused(tmp_path: Path, second: str):
    archive = archive_of(tmp_path / "a.zip", [SWEEP, (entry(second), b"other")])

    with pytest.raises(ConfigError, match="is twice in it"):
        unpack(archive, tmp_path / "in")


def test_archives_that_are_too_large_are_refused_by_what_they_declare(tmp_path: Path, monkeypatch):
    archive = archive_of(tmp_path / "a.zip", [SWEEP, (entry("sweep/big"), b"0" * 1000)])
    monkeypatch.setattr(bundle, "MOST_BYTES", 999)

    with pytest.raises(ConfigError, match=r"3 files of 1,\d+ bytes in all, and 1,000,000 of 999 bytes"):
        unpack(archive, tmp_path / "in")


def test_contents_that_are_not_those_of_the_checksums_are_refused(tmp_path: Path):
    sums = f"{sha256(b'{}').hexdigest()}  sweep/sweep.json\n"
    for name, members in {
        "changed": {"sweep/sweep.json": b"{ }", SUMS: sums.encode()},
        "more": {"sweep/sweep.json": b"{}", "sweep/more": b"", SUMS: sums.encode()},
        "fewer": {SUMS: sums.encode()},
        "none": {"sweep/sweep.json": b"{}"},
    }.items():
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)
        with pytest.raises(ConfigError, match=r"other contents than|not in both|is not a bundle"):
            unpack(tmp_path / f"{name}.zip", tmp_path / name)


def test_any_damage_of_an_archive_is_an_error_that_names_it(bundled, tmp_path: Path):
    content = bundled.read_bytes()
    for number, place in enumerate(range(0, len(content), max(1, len(content) // 60))):
        damaged = bytearray(content)
        damaged[place] ^= 0xFF
        path = tmp_path / f"{number}.zip"
        path.write_bytes(damaged)
        try:
            unpack(path, tmp_path / f"out{number}")
        except ConfigError as error:
            assert path.name in str(error)
