"""Which names a server answers to that has no keys and serves its own machine alone: that machine's.

A web page can make its own name mean 127.0.0.1 for a moment ("DNS rebinding"), and then its scripts speak to a server
there as if it were their own. They cannot change the Host header, which says whom they believe to speak to.
"""

from __future__ import annotations

import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from inlay.openai.failures import BodyError
from inlay.server.refusal import refuse

#: What balancers ask over HTTP/1.0, which knows no Host. Pages always send one, and these paths tell them nothing.
PROBES = frozenset({"/health", "/ready"})


class LocalHosts:
    """ASGI middleware: answers 421 to requests for any host but localhost and loopback addresses.

    Requests for PROBES need not name one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("host")
            host = given or ""
            probed = given is None and scope["path"] in PROBES
            if not probed and not is_local(host):
                message = (
                    f"the Host is {host!r:.80}, and a server without keys that listens on this machine alone answers "
                    "to localhost; write that, or serve with --keys, or with --open-to-network"
                )
                await refuse(BodyError(message, code="misdirected_request", status=421), scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_local(host: str) -> bool:
    """Whether a Host header names the machine that it is sent to."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
