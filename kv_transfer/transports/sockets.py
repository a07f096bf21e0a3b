"""Socket waits that end in the kernel: one system call moves a whole message, and still none waits for ever. Used by both ends of tcp."""

from __future__ import annotations

import socket
import struct


def wait_in_kernel(sock: socket.socket, seconds: float) -> None:
    """Blocking calls on `sock` give up after `seconds`: with what they moved so far, or with BlockingIOError if that is nothing.

    Cheaper than Python's own timeouts, which poll before each call and return at each segment.
    """
    sock.settimeout(None)
    whole, part = divmod(seconds, 1.0)
    value = struct.pack("ll", int(whole), int(part * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
