"""
What mkdocs does not know of this project: pages that lie elsewhere in the repository, and links out of `docs/`.

A link is written as it works in the repository, relative to the file that holds it. On the site it leads to the page
made of its target, or else to the target in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
    "experiments.md": "recipes/README.md",
}
"""Pages of the site by the file that each is made of."""

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")
"""Target of a relative Markdown link."""


def on_files(files: Any, config: Any) -> Any:
    """Add `PAGES`."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at pages of the site, or into the repository."""
    source = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    site_folder = posixpath.dirname(page.file.src_uri)
    return LINK.sub(lambda link: site_link(link[1], source, site_folder, config.repo_url), markdown)


def site_link(target: str, source: str, site_folder: str, repo_url: str) -> str:
    """
    Where a link leads on the site.

    Args:
        target (`str`): as it is written, relative to the file that holds it.
        source (`str`): that file, relative to the repository.
        site_folder (`str`): folder of its page, relative to `docs/`.
        repo_url (`str`): address of the repository.

    Returns:
        `str`: a page relative to `site_folder`, an address in the repository, or `target` itself if it is not there.
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    page = {made_of: page for page, made_of in PAGES.items()}.get(path)
    if page is None and path.startswith("docs/"):
        page = path.removeprefix("docs/")
    if page is not None:
        return posixpath.relpath(page, site_folder or ".")
    if not (ROOT / path).exists():
        return target
    return f"{repo_url}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"
