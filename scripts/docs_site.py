"""What MkDocs needs in addition to .mkdocs.yml: pages from outside docs/, their links, the API from the docstrings.

`mkdocs build -f .mkdocs.yml` and `mkdocs serve -f .mkdocs.yml` call these functions by their names.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import bitnet_np

OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages at the top of the repository -> their names on the site."""

_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that docs/ does not hold."""
    for source, name in OUTSIDE.items():
        with open(source, encoding="utf-8") as page:
            files.append(File.generated(config, name, content=page.read()))
    files.append(File.generated(config, "api.md", content=api()))
    return files


GROUPS = {
    "Models": "load open_gguf Model Config Layer Linear Expert Ternary Blocks",
    "Logits": "compute_logits forward_full forward KVCache prefill forward_incremental forward_batch pad forward_layer feed_forward masks",
    "Generation": "generate stream Sampling generate_batch Batch Request Completion",
    "Backends and roundings": "contract Metrics Dialect EXACT BITNET_CPP LLAMA_CPP Precision",
    "Judging": "check Report OperationVerdict Verdict judge Judgement hunt loss_and_gradients",
    "Dumps and comparisons": "Trace read_any record_trace record_transformers record_mlx compare_traces compare_models",
    "Errors": "Error errors",
}
"""The public names by job, in the order of the page."""
_FIRST = "---\nsearch:\n  boost: 4\n---\n"  # in the site's search: who looks for a name wants its signature


def api() -> str:
    """The page of the public names: each one's docstring, which mkdocstrings puts in its place, and where it is used."""
    used = examples(Path("docs/library.md").read_text("utf-8"))
    groups = [
        "\n\n".join([f"## {group}", *(f"::: bitnet_np.{name}\n\n[Example]({used[name]})" for name in names.split())])
        for group, names in GROUPS.items()
    ]
    return "\n\n".join([f"{_FIRST}# Python API\n\n{bitnet_np.__doc__}", *groups]) + "\n"


def examples(markdown: str) -> dict[str, str]:
    """Each public name -> the link to the first section of docs/library.md whose Python uses it."""
    links: dict[str, str] = {}
    for section in re.split(r"^(?=## )", markdown, flags=re.MULTILINE):
        title = section.partition("\n")[0].lstrip("# ").lower().replace(" ", "-")
        for code in re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            for name in re.findall(r"\bbn\.(\w+)", code):
                links.setdefault(name, f"library.md#{title}")
    return links


class FieldComments(griffe.Extension):
    """Comments behind fields of records are also their documentation on the page."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **arguments: Any) -> None:
        """Take the comment of the field's last line, unless it has a docstring."""
        _, sign, comment = attr.source.splitlines()[-1].partition("  # ") if attr.source else ("", "", "")
        if sign and attr.docstring is None and attr.parent is not None and attr.parent.is_class:
            attr.docstring = griffe.Docstring(comment, parent=attr)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of a page as the site has them: to a page of the site, or to a file of the repository."""
    folder = "" if page.file.src_uri in OUTSIDE.values() else "docs"

    def target(match: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        name = OUTSIDE.get(path, path.removeprefix("docs/"))
        inside = path in OUTSIDE or path.startswith("docs/")
        return f"]({name}" if inside else f"]({config.repo_url}/blob/main/{path}"

    return _LINK.sub(target, markdown)
