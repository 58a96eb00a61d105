"""Bytes to messages and back, without I/O: the frames of the TCP door and what they carry.

A codec is fed bytes and gives messages; it never owns a socket, so the tests drive it whole and byte by byte.
May import `tasuki.core`, `tasuki.errors` and `tasuki.config`.
"""
