"""Offline guard: with this folder on PYTHONPATH, Python may talk to this machine only.

An audit hook refuses connecting, looking up a name and sending, unless the address is loopback or
a Unix socket. Each attempt is also appended to the file named by LECTURE_OFFLINE_LOG, so one that
a try/except swallowed is still found. It sees sockets that Python opens, not those of C or Rust
libraries or of other programs.
"""

import sys

EVENTS = frozenset(
    f"socket.{name}"
    for name in ("connect", "getaddrinfo", "gethostbyname", "gethostbyaddr", "sendto", "sendmsg")
)
LOCAL = ("", "localhost", "::", "::1", "0.0.0.0", "ip6-localhost")


class OutsideConnection(ConnectionError):
    """The course's tests run offline; this code tried to reach another machine."""


def is_local(host: object) -> bool:
    if host is None:
        return True
    host = host.decode(errors="replace") if isinstance(host, bytes) else str(host)
    if host.lower() in LOCAL or host.startswith(("127.", "::ffff:127.")):
        return True
    from socket import gethostname

    return host.lower().removesuffix(".local") == gethostname().lower().removesuffix(".local")


def guard(event: str, args: tuple) -> None:
    if event not in EVENTS:
        return
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = args[1]
        if not isinstance(address, tuple):  # a Unix socket's path, or None: already connected
            return
        host = address[0]
    else:
        host = args[0]
    if is_local(host):
        return
    message = f"{event} to {host!r} by {' '.join(sys.argv)[:200] or 'python'}"
    _record(message)
    raise OutsideConnection(f"{message}: the course's tests and notebooks run offline")


def _record(message: str) -> None:
    import os

    if path := os.environ.get("LECTURE_OFFLINE_LOG"):
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(log, f"{message} (process {os.getpid()})\n".encode())
        os.close(log)


if not hasattr(sys, "lecture_offline"):  # a hook cannot be taken out: one is enough
    sys.lecture_offline = True
    sys.addaudithook(guard)
