"""Security: who may read a state, and what proves that it is the source's own."""

from __future__ import annotations

import hashlib
import hmac
import ssl
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, repr=False)
class Security:
    """What both sides of a transfer share.

    token: whoever reads must have it. It travels with each request and nowhere else; without
      `tls` it travels in the clear.
    tls: the context of this side: a server's for who sends, a client's for who receives; a pair
      of both, server's first, for a transport that does both. Makes all addresses https.
    mac: a key of its own (text or bytes) with which states are authenticated, so that nobody on
      the way can change or replay one; True takes the token for it, which protects only where
      the token cannot be read on the way.
    """

    token: str | None = None
    tls: ssl.SSLContext | tuple[ssl.SSLContext, ssl.SSLContext] | None = None
    mac: str | bytes | bool | None = None

    def __post_init__(self) -> None:
        if self.token is not None and not (self.token and self.token.isascii()):
            raise ValueError("the token must be ASCII text that is not empty")
        if self.token is not None and not self.token.isprintable():
            raise ValueError("the token must have no line breaks or other control characters")
        if isinstance(self.mac, str | bytes) and not self.mac:
            raise ValueError("the key of the mac must not be empty")
        if self.mac is True and self.token is None:
            raise ValueError("mac=True takes the token as its key, and there is none")

    def __repr__(self) -> str:
        return f"Security(token={self.token is not None}, tls={self.tls is not None})"

    @property
    def key(self) -> bytes:
        """The key that states are authenticated with; empty where they are not."""
        if self.mac is None or self.mac is False:
            return b""
        secret = self.token if self.mac is True else self.mac
        raw = secret.encode() if isinstance(secret, str) else bytes(secret or b"")
        return hashlib.blake2b(raw, digest_size=32, person=b"state mac").digest()

    @property
    def server_context(self) -> ssl.SSLContext | None:
        """The TLS context for accepting."""
        return self.tls[0] if isinstance(self.tls, tuple) else self.tls

    @property
    def client_context(self) -> ssl.SSLContext | None:
        """The TLS context for connecting."""
        return self.tls[1] if isinstance(self.tls, tuple) else self.tls

    def header(self) -> list[tuple[str, str]]:
        """The header of a request that shows the token."""
        return [] if self.token is None else [("Authorization", f"Bearer {self.token}")]

    def admits(self, header: bytes | None) -> bool:
        """Whether a request with this Authorization header may read. Takes the same time."""
        if self.token is None:
            return True
        expected = f"Bearer {self.token}".encode()
        return hmac.compare_digest(header or b"", expected)
