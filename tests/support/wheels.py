"""The wheel of this checkout, made as a release is, and an environment that has it without the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]


class Installed(NamedTuple):
    """An environment that has the wheel, and not the checkout."""

    scripts: Path
    environment: dict[str, str]

    def run(self, program: str, *arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
        command = [str(self.scripts / program), *arguments]
        return subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged: building leaves files behind, and finds those that earlier builds left."""
    folder = tmp_path_factory.mktemp("source")
    for name in ["pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"]:
        shutil.copy(ROOT / name, folder)
    for name in FOLDERS.values():
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as a release is: from the source archive."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in a new environment, which borrows the dependencies from the present one."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=os.name != "nt")
    scripts = place / ("Scripts" if os.name == "nt" else "bin")
    ask = [str(scripts / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    library = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (library / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(place)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--ignore-installed", str(wheel)], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return Installed(scripts, environment)
