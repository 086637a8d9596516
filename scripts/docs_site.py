"""What MkDocs asks of the documentation site beside .mkdocs.yml: pages from outside docs/, their links, the API from the docstrings.

`mkdocs build -f .mkdocs.yml` and `mkdocs serve -f .mkdocs.yml` call these functions by their names.
"""

import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import bitnet_np

OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages at the top of the repository -> their names on the site."""

_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that docs/ does not hold."""
    for source, name in OUTSIDE.items():
        with open(source, encoding="utf-8") as page:
            files.append(File.generated(config, name, content=page.read()))
    files.append(File.generated(config, "api.md", content=api()))
    return files


def api() -> str:
    """The page of the public names: each one's docstring, which mkdocstrings puts in its place."""
    names = "\n\n".join(f"::: bitnet_np.{name}" for name in bitnet_np.__all__)
    return f"# Python API\n\n{bitnet_np.__doc__}\n\n{names}\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of a page as the site has them: to a page of the site, or to a file of the repository."""
    folder = "" if page.file.src_uri in OUTSIDE.values() else "docs"

    def target(match: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        name = OUTSIDE.get(path, path.removeprefix("docs/"))
        inside = path in OUTSIDE or path.startswith("docs/")
        return f"]({name}" if inside else f"]({config.repo_url}/blob/main/{path}"

    return _LINK.sub(target, markdown)
