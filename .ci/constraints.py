"""Remakes constraints.txt, the exact versions that are installed: `make constraints`.

Takes interpreters. The first one's newest versions are used for every Python that they support; where they do
not, that Python gets its own pin, with a marker. What only Windows or macOS installs is pinned too. With
--keep, what is pinned already stays, and only what is missing is added.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
HELD = ["torch==2.13.0"]
"""Changed by hand, with care: a new torch may change the last bit of a merge."""

FOREIGN = {
    "win_amd64": {"sys_platform": "win32", "platform_system": "Windows", "os_name": "nt"},
    "macosx_14_0_arm64": {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"},
}
UNPINNED = re.compile(r"nvidia-|cuda-|triton$|mecha-exp$")
"""torch names the exact versions of its CUDA libraries itself."""

HEADER = """\
# The exact versions that the targets of the Makefile install, for Python 3.10 to 3.13.
# Made by `make constraints`; the ranges that mecha_exp works with are in pyproject.toml.
"""

Report = dict[str, dict[str, Any]]
"""The metadata of each package that would be installed, by normalised name."""


def resolve(python: str, requirements: list[str], options: list[str], pins: dict[str, str]) -> Report:
    """What pip would install for that interpreter, with these versions given."""
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "pins.txt")
        given.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        command = [sys.executable, "-m", "pip", "--python", python, "install", "--dry-run", "--quiet"]
        command += ["--ignore-installed", "--report=-", f"--constraint={given}", *options, *requirements]
        answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = [item["metadata"] for item in json.loads(answer)["install"]]
    return {normalised(metadata["name"]): metadata for metadata in found}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(report: Report) -> dict[str, str]:
    return {name: metadata["version"].partition("+")[0] for name, metadata in report.items()}


def only_elsewhere(report: Report, environment: dict[str, str]) -> list[str]:
    """The requirements that hold in that environment alone."""
    declared = [text for metadata in report.values() for text in metadata.get("requires_dist", [])]
    return [
        f"{need.name}{need.specifier}"
        for need in map(Requirement, declared)
        if need.marker
        and need.marker.evaluate({"extra": "", **environment})
        and normalised(need.name) not in report
    ]


def pinned_lines(resolved: dict[str, dict[str, str]]) -> list[str]:
    """One line a package, or one a version with the Python versions that it is for."""
    pythons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for python in sorted(resolved, key=Version):
        for name, version in resolved[python].items():
            pythons[name][version].append(python)
    lines = []
    for name, by_version in sorted(pythons.items()):
        choices = list(by_version.items())
        for i, (version, users) in enumerate(choices):
            bounds = [f'python_version >= "{users[0]}"'] if i > 0 else []
            bounds += [f'python_version < "{choices[i + 1][1][0]}"'] if i + 1 < len(choices) else []
            lines.append(f"{name}=={version}" + (" ; " + " and ".join(bounds) if bounds else ""))
    return [line for line in lines if not UNPINNED.match(line.partition("==")[0])]


def kept(number: str) -> dict[str, str]:
    """The versions that constraints.txt has for that Python already."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    fitting = [pin for pin in pins if not pin.marker or pin.marker.evaluate({"python_version": number})]
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in fitting}


def number_of(python: str) -> str:
    """The version of an interpreter: `3.11`."""
    command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the versions that are pinned already")
    parser.add_argument("pythons", nargs="+", help="interpreters, the most important one first")
    options = parser.parse_args()
    wanted = [
        "pip",
        "setuptools",
        *HELD,
        ".[test,docs,train,hub,evaluators,s3,launchers]",
        "moto[s3]",
        "psycopg[binary]",
    ]
    pins = {python: kept(number_of(python)) if options.keep else {} for python in options.pythons}
    first = resolve(options.pythons[0], wanted, [], pins[options.pythons[0]])
    for platform, environment in FOREIGN.items():
        while missing := only_elsewhere(first, environment):
            found = ["--no-deps", "--only-binary=:all:", f"--platform={platform}", "--target=unused"]
            first |= resolve(options.pythons[0], missing, found, pins[options.pythons[0]])
    resolved = {}
    for python in options.pythons:
        number = number_of(python)
        usable = {
            name: version
            for name, version in versions(first).items()
            if number in SpecifierSet(first[name].get("requires_python", ""))
        }
        resolved[number] = usable | versions(resolve(python, wanted, [], usable | pins[python]))
    lines = pinned_lines(resolved)
    (ROOT / "constraints.txt").write_text(HEADER + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
