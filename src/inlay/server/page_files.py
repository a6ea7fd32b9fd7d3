"""The page at ``/``: static files, with headers under which a browser loads and runs nothing else.

The page uses the public HTTP API. It imports no torch, so the files are served while the model loads.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parent / "page"

_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_IMPORT_MAP = re.compile(rb'<script type="importmap">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page: its bytes, its media type and its ETag."""

    content: bytes
    media_type: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """Return the files by name. They are read once."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix not in _TYPES:
            continue
        content = path.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        found[path.name] = PageFile(content, _TYPES[path.suffix], etag)
    return found


@cache
def page_headers() -> dict[str, str]:
    """Return the headers of all files of the page.

    The only inline script is the import map. Its hash is part of the policy. Trusted types forbid the page to make
    HTML from text.
    """
    found = _IMPORT_MAP.search(page_files()["index.html"].content)
    assert found is not None, "index.html has an import map"
    digest = base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
    policy = {
        "default-src": "'none'",
        "script-src": f"'self' 'sha256-{digest}'",
        "style-src": "'self'",
        "img-src": "'self'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }


def page_response(name: str, if_none_match: str | None = None) -> Response | None:
    """Return the response with a file of the page; None if there is no such file."""
    file = page_files().get(name)
    if file is None:
        return None
    headers = {**page_headers(), "ETag": file.etag}
    if if_none_match is not None and file.etag in if_none_match:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


def name_of(path: str) -> str | None:
    """Return the name of the file at a path of the server; None for other paths."""
    if path == "/":
        return "index.html"
    return path.removeprefix("/page/") if path.startswith("/page/") else None


@router.get("/")
async def page(request: Request) -> Response:
    return _found(request, "index.html")


@router.get("/page/{name}")
async def page_file(request: Request, name: str) -> Response:
    return _found(request, name)


def _found(request: Request, name: str) -> Response:
    response = page_response(name, request.headers.get("if-none-match"))
    if response is None:
        raise HTTPException(404)
    return response
