"""The socket that a server listens on: opened before a model is loaded, so that what is wrong is said at once."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import suppress

from inlay.errors import ParameterError

_LAST_PORT = 65535
_LONGEST_MS = 2**31 - 1
_BACKLOG = 2048  # connections that the system keeps while the model is being loaded, or an event loop is busy


def listen(host: str, port: int, *, network: bool) -> socket.socket:
    """Listen on a host and a port, 0 for any that is free.

    network: whether it may be reached from other machines.
    Raises ParameterError: for an unknown host, a port in use, or a host that others can reach if they may not.
    """
    if not 0 <= port <= _LAST_PORT:
        raise ParameterError(f"--port is {port}; it must be a number from 1 to {_LAST_PORT}, or 0 for any that is free")
    family, address = _address(host, port)
    if not network and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        raise ParameterError(
            f"--host {host} can be reached from other machines, and without keys everybody there may use the model; "
            "give --keys (see 'inlay keys add --help'), or --open-to-network if that is meant"
        )
    try:
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except PermissionError:
        raise ParameterError(f"--port {port} is not allowed for this user; take one from 1024 on") from None
    except OSError as error:
        raise ParameterError(_why_not(host, port, error)) from None


def url(listener: socket.socket) -> str:
    """What clients take for their base URL."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}/v1" if ":" in shown else f"http://{shown}:{port}/v1"


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The address of a host; of several that for IPv4, as most programs try that one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise ParameterError(f"--host {host!r} is not known here; give an address or a name of this machine") from None
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, (str(address[0]), int(address[1]))


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use, perhaps by another server; give another --port, or 0 for any"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine; give one that is, or 0.0.0.0 for all of them"
    return f"--host {host} --port {port} cannot be listened on: {error.strerror or error}"


def drop_sleepers(listener: socket.socket, seconds: float) -> None:
    """Let the system end connections whose clients take nothing for so long, where it can.

    What a server has handed over it can no longer take back, and its own connection waits for that to be read. Linux
    counts the time that a client's window is closed, too (RFC 5482).
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        with suppress(OSError):
            listener.setsockopt(socket.IPPROTO_TCP, option, min(int(seconds * 1000), _LONGEST_MS))
