"""Encoder of the form that starts a run at a node agent: multipart/form-data of a known length. `agent/upload.py` reads it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

import msgspec

__all__ = ["MultipartForm", "run_fields"]


def run_fields(
    exec_: str | None, args: Sequence[str], timeout_s: float | None, inputs: Iterable[str] = ()
) -> list[tuple[str, str]]:
    """Return the fields of a run. Without `exec_` the agent chooses it; `inputs` name files that the agent fetches itself."""
    fields = [("args", msgspec.json.encode(args).decode())]
    if exec_:
        fields.append(("exec", exec_))
    if timeout_s is not None:
        fields.append(("timeout_s", repr(timeout_s).removesuffix(".0")))
    return fields + [("input", name) for name in inputs]


class MultipartForm:
    """Fields, then files with their names and sizes. The contents of the files are given to `pieces`."""

    def __init__(self, fields: Iterable[tuple[str, str]], files: Sequence[tuple[str, int]]) -> None:
        boundary = secrets.token_hex(16)
        self._fields = b"".join(_field(boundary, name, value) for name, value in fields)
        self._heads = [_file_head(boundary, name) for name, _ in files]
        self._end = f"--{boundary}--\r\n".encode()
        size_bytes = len(self._fields) + len(self._end)
        size_bytes += sum(len(head) + size + len(b"\r\n") for head, (_, size) in zip(self._heads, files, strict=True))
        self.headers = {"Content-Type": f"multipart/form-data; boundary={boundary}", "Content-Length": str(size_bytes)}

    async def pieces(self, contents: Iterable[AsyncGenerator[bytes, None]]) -> AsyncGenerator[bytes, None]:
        """Yield the body; `contents` has the bytes of each file, in their order."""
        before = self._fields
        for head, content in zip(self._heads, contents, strict=True):
            before += head
            async with aclosing(content):
                async for piece in content:
                    yield before + piece if before else piece
                    before = b""
            before += b"\r\n"
        yield before + self._end


def _field(boundary: str, name: str, value: str) -> bytes:
    return f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


def _file_head(boundary: str, name: str) -> bytes:
    plain = name.replace('"', '\\"')  # names have no backslash
    disposition = f'Content-Disposition: form-data; name="file"; filename="{plain}"'
    return f"--{boundary}\r\n{disposition}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
