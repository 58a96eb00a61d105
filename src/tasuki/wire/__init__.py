"""The wire protocol without I/O: bytes to frames to messages, and back. docs/wire.md describes it.

    messages      bytes <-> frames, with their size limits <-> the messages of `core.protocol`
    compression   payloads of frames

A decoder is fed bytes and returns frames; it never owns a socket, so that tests drive it whole and byte by byte. Links (`net`)
and doors import this folder, which may import `tasuki.core`, `tasuki.errors` and `tasuki.config`.
"""
