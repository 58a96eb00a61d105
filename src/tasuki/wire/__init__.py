"""The wire protocol without I/O: bytes to frames to messages, and back. docs/wire.md describes it.

    frames        bytes <-> frames, with their size limits
    compression   payloads of frames
    messages      frames <-> the messages of `core.protocol`

A decoder is fed bytes and returns frames; it never owns a socket, so that tests drive it whole and byte by byte. Links (`net`)
and doors import this folder, which may import `tasuki.core`, `tasuki.errors` and `tasuki.config`.
"""
