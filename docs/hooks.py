"""Hooks of MkDocs, which turn pages as the repository has them into pages of the site.

Links to files outside docs/ become text, because the site has no such pages. The note behind a block's language, which
tells the tests how to run the block, is removed.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

_LOG = logging.getLogger("mkdocs.hooks")
_DOCS = Path(__file__).parent
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")
_NOTE = re.compile(r"^(```\w+) .+$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Names the anchors of headings as GitHub does, and as the pages' links expect."""
    config.mdx_configs["toc"]["slugify"] = _slug
    return config


def _slug(heading: str, separator: str) -> str:
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", separator)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page for the site. Warns about a link to a file that does not exist, which ends a strict build."""
    folder = (_DOCS / page.file.src_uri).parent

    def unlinked(link: re.Match[str]) -> str:
        label, path = link[1], link[2]
        target = (folder / path).resolve()
        if target.is_relative_to(_DOCS):
            return link[0]
        if not target.exists():
            _LOG.warning("%s: there is no %s", page.file.src_uri, path)
        return f'<span title="{path}">{label}</span>'

    return _NOTE.sub(r"\1", _LINK.sub(unlinked, markdown))
