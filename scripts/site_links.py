"""A hook of mkdocs: links of pages that leave docs/ go to the repository, and those to folders to their page.

The pages are read on GitHub as well, where both kinds work as they stand.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

REPOSITORY = "https://github.com/flashgen/flashgen"
ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite the links of a page, outside of its code."""
    return rewritten(markdown, page.file.src_uri)


def rewritten(markdown: str, page: str) -> str:
    """The text of a page, whose path below docs/ is `page`, with links that a site has a target for."""

    def link(match: re.Match[str]) -> str:
        return match[1] + _target(match[2], posixpath.dirname(page)) + (match[3] or "") + match[4]

    # pieces between fences stand at even places
    pieces = [piece if n % 2 else LINK.sub(link, piece) for n, piece in enumerate(FENCE.split(markdown))]
    return "".join(pieces)


def _target(link: str, folder: str) -> str:
    if "://" in link or link.startswith("mailto:"):
        return link
    path = posixpath.normpath(posixpath.join("docs", folder, link))
    if (ROOT / path).is_dir():
        if path.startswith("docs/") and (ROOT / path / "README.md").is_file():
            return f"{link.rstrip('/')}/README.md"
        return f"{REPOSITORY}/tree/main/{path}"
    return link if path.startswith("docs/") else f"{REPOSITORY}/blob/main/{path}"
