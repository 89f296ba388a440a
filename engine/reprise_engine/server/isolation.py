"""Whose prefixes a request may be served from: `--prefix-cache-isolation`.

    none      everybody's with the same cache_salt, which the client chooses
    per-key   those of the same API key with the same cache_salt

A shared cache tells, by the time to the first token, whether somebody else has sent a prompt. Per key the salt is made
here, so a client can neither leave it out nor guess another's: HMAC-SHA256 of the API key and the request's cache_salt,
under a secret that only the server knows. The secret is drawn at each start unless it is given; replicas whose names of
blocks are compared by a gateway need the same one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fastapi import Request

IsolationMode = Literal["none", "per-key"]


class Isolation:
    """Makes the salt under which a request is cached."""

    def __init__(self, mode: IsolationMode = "none", *, secret: str | None = None) -> None:
        self.per_key = mode == "per-key"
        self._secret = secrets.token_bytes(32) if secret is None else secret.encode()

    def salt(self, api_key: str | None, cache_salt: str | None) -> str | None:
        """Of a request with this key and this cache_salt; both None means neither was sent."""
        if not self.per_key:
            return cache_salt
        assert api_key is not None, "per-key isolation without API keys"
        fields = (api_key,) if cache_salt is None else (api_key, cache_salt)
        # Each with its length, so that no two pairs are the same text.
        message = b"".join(len(data).to_bytes(4, "big") + data for data in (field.encode() for field in fields))
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


def request_api_key(request: Request) -> str | None:
    """The key by which ApiKeys let the request in; None where the server has none."""
    key: str | None = getattr(request.state, "api_key", None)
    return key
