"""Addresses: where a source listens, what it calls itself, and how several are told in one string.

The metadata of one source are its addresses, separated by commas, the best one first; those of
several sources are separated by spaces.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

PATH: Final = "/checkpoint/"
_LOOPBACK: Final = "127.0.0.1"
_SIOCGIFADDR: Final = 0x8915


def join_metadata(sources: Sequence[str]) -> str:
    """The metadata of several sources as one string, for `recv_checkpoint`."""
    return " ".join(source for text in sources for source in text.split())


def split_metadata(metadata: str) -> list[list[str]]:
    """For each source its addresses; ValueError where there is none or one is no http address."""
    sources = [source.split(",") for source in metadata.split()]
    if not sources:
        raise ValueError("the metadata name no source")
    for address in (address for source in sources for address in source):
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port:
            raise ValueError(f"expected http://HOST:PORT{PATH} in the metadata, got {address!r}")
    return sources


def address_of(host: str, port: int, *, tls: bool) -> str:
    """The address of a server, to which the step is appended."""
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}{PATH}"


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface (Linux); OSError where it has none."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("256s", name.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
    return socket.inet_ntoa(answer[20:24])


def listen(bind: str | None, port: int, *, interface: str | None, guarded: bool) -> socket.socket:
    """A listening socket.

    Bound to `bind` (an address or name; `""` for all), else to the address of `interface`, else
    to loopback, or to all addresses where a token guards what is served.
    """
    if bind is None and interface is not None:
        bind = interface_address(interface)
    if bind is None:
        bind = "" if guarded else _LOOPBACK
    if bind == "":
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
        except (OSError, ValueError):
            return socket.create_server(("", port), backlog=1024)  # a host without IPv6
    family = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((bind, port), family=family, backlog=1024)


def advertised(listener: socket.socket, advertise: str | Sequence[str] | None) -> list[str]:
    """The hosts under which a listening socket is told to others."""
    if advertise is not None:
        return [advertise] if isinstance(advertise, str) else list(advertise)
    host = str(listener.getsockname()[0])
    return [socket.gethostname()] if host in ("0.0.0.0", "::") else [host]  # noqa: S104 - compared
