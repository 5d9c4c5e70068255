"""Checks for `make lint`: what pages name is there, lists are whole, and who may import what."""

import ast
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "RELEASING.md"))]
PAGES += sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\(([^)#]+)")
FOLDERS = "bench|conf|docs|examples|mecha_exp|methods|model_configs|parity|tests"
PATH = re.compile(rf"`([\w.-]+/[\w./-]*\.py|(?:{FOLDERS})/[\w./-]*)`")
MODULE = re.compile(r"`(mecha_exp(?:\.\w+)+)`")

OPEN = {"mecha_exp", "mecha_exp.architectures", "mecha_exp.extensions.merge_methods", "mecha_exp.methods"}
"""What of mecha_exp a built-in method may import, as a method of a user's own may."""

LIBRARIES = {"numpy", "scipy", "torch"} | sys.stdlib_module_names
INSIDES = ("hydra._", "omegaconf._", "omegaconf.base")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def faults_of_pages() -> Iterator[str]:
    """Links, files, modules, options, targets and tests that a page names and that are not there."""
    for page in PAGES:
        text = read(page)
        links = (link for link in LINK.findall(text) if "://" not in link)
        yield from (
            f"{page.name}: the link to {link} is broken"
            for link in links
            if not (page.parent / link).exists()
        )
        yield from (
            f"{page.name}: {path} is not there" for path in PATH.findall(text) if not (ROOT / path).exists()
        )
        yield from (f"{page.name}: there is no {name}" for name in MODULE.findall(text) if not resolves(name))
    for folder in ("conf", "examples", "mecha_exp", "methods"):
        for file in (path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")):
            for page in re.findall(r"\bdocs/[\w/-]+\.md", read(file)):
                if not (ROOT / page).exists():
                    yield f"{file.relative_to(ROOT)}: {page} is not there"
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", read(ROOT / "docs" / "security.md")):
        if f"def {name}(" not in read(ROOT / file):
            yield f"docs/security.md: {file} has no test {name}"


def resolves(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def faults_of_lists() -> Iterator[str]:
    """Options, public names and targets of make that their page leaves out; the version to cite."""
    for group, page in (("evaluator", "evaluators.md"), ("sweep", "sweeps.md")):
        text = read(ROOT / "docs" / page)
        options = (path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))
        yield from (f"docs/{page} leaves out {name}" for name in options if f"`{name}`" not in text)
    pages = "\n".join(read(page) for page in (ROOT / "docs" / "api").glob("*.md"))
    described = set(re.findall(r"^::: mecha_exp\.(?:extensions\.)?(\w+)$", pages, re.MULTILINE))
    public = set(re.findall(r" as (\w+)", read(ROOT / "mecha_exp" / "__init__.pyi"))) - {"extensions"}
    yield from (f"docs/api leaves out {name}" for name in sorted(public - described))
    targets = re.findall(r"^([a-z]+):.*## ", read(ROOT / "Makefile"), re.MULTILINE)
    text = read(ROOT / "CONTRIBUTING.md")
    yield from (f"CONTRIBUTING.md leaves out make {name}" for name in targets if f"`make {name}`" not in text)
    if yaml.safe_load(read(ROOT / "CITATION.cff"))["version"] != pkgutil.resolve_name(
        "mecha_exp.__version__"
    ):
        yield "CITATION.cff has another version than the package"


def faults_of_imports() -> Iterator[str]:
    """Built-in methods that import more than others may, and modules that use the insides of Hydra."""
    for path in sorted((ROOT / "methods").glob("*.py")):
        beyond = {m for m in imported(path) - OPEN if not m.startswith("mecha_exp.methods.")}
        yield from (f"{path.name} imports {m}" for m in beyond if m.partition(".")[0] not in LIBRARIES)
    for path in (ROOT / "mecha_exp").rglob("*.py"):
        inside = {m for m in imported(path, names=True) if f"{m}.".startswith(INSIDES)}
        yield from (f"{path.relative_to(ROOT)} uses {m}" for m in inside)


def imported(path: Path, *, names: bool = False) -> set[str]:
    """The modules that a file imports, or what it imports of them."""
    nodes = list(ast.walk(ast.parse(read(path))))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in (node for node in nodes if isinstance(node, ast.ImportFrom)):
        module = "." * node.level + (node.module or "")
        modules |= {f"{module}.{alias.name}" for alias in node.names} if names else {module}
    return modules


if __name__ == "__main__":
    faults = [*faults_of_pages(), *faults_of_lists(), *faults_of_imports()]
    sys.exit("\n".join(faults) or 0)
