"""Answers over HTTP about presigned URLs, which move a blob straight between a peer and the bucket of the server."""

from __future__ import annotations

import msgspec

from tasuki.core.decoding import decodable


class BlobLink(msgspec.Struct, frozen=True, omit_defaults=True):
    """A presigned URL to GET all bytes, or PUT these bytes, of a blob: a secret, valid for `expires_s` seconds."""

    url: str
    expires_s: float
    offset: int
    size_bytes: int
    headers: dict[str, str] = {}
    """To be sent exactly so."""

    def __repr__(self) -> str:
        return f"BlobLink(offset={self.offset}, size_bytes={self.size_bytes})"


@decodable
class BlobDownload(msgspec.Struct, omit_defaults=True):
    """Links for one blob; without them this server gives none: GET the blob here."""

    link: BlobLink | None = None


@decodable
class BlobUpload(msgspec.Struct, omit_defaults=True):
    """The bytes still to be sent. `have`: none, the blob is stored. Not `direct`: this server gives no links, PUT it here."""

    have: bool = False
    direct: bool = False
    links: list[BlobLink] = []
    """The next parts; send them and ask again. None: commit."""
    missing_bytes: int = 0


@decodable
class BlobCommitted(msgspec.Struct):
    """`stored`: the blob is verified and durable; if not, ask again."""

    stored: bool
