"""How processes of one cluster reach each other over gRPC: plain or with TLS, with or without the cluster's own token.

Made once per process from a `Security`, which is plain values that a new process can be handed. Every channel to and every port of an
internal server comes from here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from common.access import AUTHORIZATION, Guard, Role, Tokens, needs_of
from common.keyring import Key, Keyring, ring_of
from common.tls import Tls, TlsFiles
from common.watched import Watched, read_file


@dataclass(frozen=True)
class Security:
    """`key_file` unset: the key is handed to each process at its start. `requires_tokens`: servers let nobody in without a token, and
    processes of the cluster show its own. `token_file`: what a client or frontend shows instead.
    """

    tls: TlsFiles | None = None
    key_file: str | None = None
    tokens_file: str | None = None
    requires_tokens: bool = False
    token_file: str | None = None


class Wire:
    """`key`: used where `security.key_file` is unset; `token`: where `security.token_file` is.

    Raises: ConfigError if a file can't be read
    """

    def __init__(self, security: Security | None = None, key: Key = b"", token: str = ""):
        self.security = security or Security()
        self._token = token
        self._token_file = _token_file(self.security.token_file)
        self.keys: Keyring = Keyring.of_file(Path(self.security.key_file)) if self.security.key_file else ring_of(key)
        self._tls = Tls(self.security.tls) if self.security.tls else None

    # -- the calling side --------------------------------------------------------------------------------------------------------------

    def channel(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._tls.channel_credentials(), options=(*options, *self._tls.channel_options()))

    def blocking_channel(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self._tls.channel_credentials(), options=(*options, *self._tls.channel_options()))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call shows."""
        token = self._token_file.get() if self._token_file else self._token
        if not token and self.security.requires_tokens:
            token = self.keys.tokens()[0]
        return ((AUTHORIZATION, f"Bearer {token}"),) if token else ()

    def stub(self, stub: Any) -> Any:
        """The stub, with the token on every call if there is one to show."""
        return _TokenStub(stub, self) if self.metadata() else stub

    def version(self) -> object:
        """Changes when channels should be made anew, since certificates have changed."""
        return self._tls.version() if self._tls else None

    # -- the serving side --------------------------------------------------------------------------------------------------------------

    def bind(self, server: grpc.aio.Server, address: str, *, internal: bool) -> int:
        """Returns: the port. Raises: RuntimeError if it can't be had, as grpc does"""
        if self._tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self._tls.server_credentials(internal=internal))

    def guards(self, roles: dict[str, Role], otherwise: Role) -> list[Guard]:
        """Interceptors for a server. `roles`: by the bare name of the method."""
        if not self.security.requires_tokens:
            return []
        file = self.security.tokens_file
        return [Guard(Tokens(Path(file) if file else None, self.keys), needs_of(roles, otherwise))]


class _TokenStub:
    def __init__(self, stub: Any, wire: Wire):
        self._stub = stub
        self._wire = wire

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)

        def call(*arguments: Any, **options: Any) -> Any:
            return method(*arguments, metadata=self._wire.metadata(), **options)

        setattr(self, name, call)
        return call


@dataclass(eq=False)
class _Kept:
    version: object
    channel: grpc.aio.Channel
    used_s: float


class Channels:
    """One channel per address, a fresh one once certificates have changed. One that was not asked for within `idle_s`, which must be longer
    than any call takes, is closed when the next is made: peers come and go under ever new addresses. To be used on one event loop."""

    def __init__(self, wire: Wire, options: Sequence[tuple[str, Any]] = (), idle_s: float = 60.0):
        self._wire = wire
        self._options = options
        self._idle_s = idle_s
        self._open: dict[str, _Kept] = {}
        self._older: list[_Kept] = []
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str) -> grpc.aio.Channel:
        version, now_s = self._wire.version(), time.monotonic()
        kept = self._open.get(address)
        if kept is not None and kept.version is version:
            kept.used_s = now_s
            return kept.channel
        if kept is not None:
            self._older.append(kept)
        self._close_idle(now_s)
        channel = self._wire.channel(address, self._options)
        self._open[address] = _Kept(version, channel, now_s)
        return channel

    async def close(self) -> None:
        channels = [kept.channel for kept in (*self._older, *self._open.values())]
        self._older.clear()
        self._open.clear()
        for channel in channels:
            await channel.close()
        await asyncio.gather(*self._closing)

    def _close_idle(self, now_s: float) -> None:
        idle = [kept for kept in (*self._older, *self._open.values()) if now_s - kept.used_s > self._idle_s]
        self._older = [kept for kept in self._older if kept not in idle]
        self._open = {address: kept for address, kept in self._open.items() if kept not in idle}
        for kept in idle:
            task = asyncio.ensure_future(kept.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _token_file(path: str | None) -> Watched[str] | None:
    if path is None:
        return None
    return Watched([Path(path)], lambda: read_file(Path(path), "token file").decode().strip())


PLAIN = Wire()
