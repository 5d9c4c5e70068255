"""Hooks of `mkdocs.yml`: pages from the top of the repository, and links that lead out of `docs/`."""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages that stand at the top of the repository, and what the site calls them."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand at the top of the repository."""
    for name, page in TOP.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to pages of the site; a link to a file that is not a page becomes its path."""
    top = page.file.src_uri in TOP.values()
    folder = ROOT if top else (ROOT / "docs" / page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = Path(os.path.normpath(folder / target)).relative_to(ROOT)
        uri = TOP.get(path.as_posix()) or path.as_posix().removeprefix("docs/")
        if files.get_file_from_path(uri) is None:
            return f"`{path}`" if text.strip("`") == str(path) else f"{text} (`{path}`)"
        relative = os.path.relpath(uri, Path(page.file.src_uri).parent)
        return f"{image}[{text}]({relative}{anchor or ''})"

    return LINK.sub(link, markdown)
