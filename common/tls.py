"""TLS of gRPC and HTTP from certificate files that may be replaced at any time: new connections use the new ones, old ones go on.

Internal servers always know clients by certificate; `mutual: all` asks it of the router's and the frontends' clients too.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc

from common.errors import ConfigError
from common.watched import Watched, read_file

Mutual = Literal["all", "internal", "none"]


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files on the host of the process. Servers need a certificate; a client shows one if it has it.

    `ca_file`: whose certificates are believed. `peer_name`: the name that every server's certificate holds; unset = its host.
    """

    ca_file: str
    cert_file: str | None = None
    key_file: str | None = None
    mutual: Mutual = "internal"
    peer_name: str | None = None

    @property
    def paths(self) -> list[Path]:
        return [Path(path) for path in (self.ca_file, self.cert_file, self.key_file) if path is not None]


@dataclass(frozen=True)
class _Pems:
    ca: bytes
    cert: bytes | None
    key: bytes | None


class Tls:
    """One process's certificates. Raises: ConfigError if the files can't be used"""

    def __init__(self, files: TlsFiles):
        self.files = files
        self._pems = Watched(files.paths, lambda: _read(files))

    def server_credentials(self, *, internal: bool) -> grpc.ServerCredentials:
        """`internal`: of a server that only processes of the cluster call. Raises: ConfigError without a certificate"""
        if self.files.cert_file is None or self.files.key_file is None:
            raise ConfigError("tls: a server needs cert_file and key_file")

        def configuration():
            pems = self._pems.get()
            return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)

        asks = self.files.mutual == "all" or (internal and self.files.mutual == "internal")
        return grpc.dynamic_ssl_server_credentials(configuration(), configuration, asks)

    def version(self) -> object:
        """Another object after each change of the files."""
        return self._pems.get()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        pems = self._pems.get()
        return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        return (("grpc.ssl_target_name_override", self.files.peer_name),) if self.files.peer_name else ()


class HttpTls:
    """The context of an HTTPS server; `follow` puts changed files to use for new connections."""

    def __init__(self, cert_file: Path, key_file: Path, client_ca_file: Path | None):
        """`client_ca_file`: set = clients must show a certificate by it. Raises: ConfigError if a file can't be used"""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if client_ca_file is not None:
            self.context.verify_mode = ssl.CERT_REQUIRED
        paths = [cert_file, key_file, *([client_ca_file] if client_ca_file else [])]

        def load() -> None:
            try:
                self.context.load_cert_chain(cert_file, key_file)
                if client_ca_file is not None:
                    self.context.load_verify_locations(client_ca_file)
            except (OSError, ssl.SSLError) as exc:
                raise ConfigError(f"certificate {cert_file}: {exc}") from exc

        self._files = Watched(paths, load)

    def follow(self) -> None:
        """Call about once a second."""
        self._files.get()


def _read(files: TlsFiles) -> _Pems:
    """Raises: ConfigError if a file is missing or certificate and key do not belong together"""
    try:
        if files.cert_file is not None:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.cert_file, files.key_file)
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(files.ca_file)
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"TLS files {', '.join(map(str, files.paths))}: {exc}") from exc
    ca, *own = (read_file(path, "TLS file") for path in files.paths)
    cert, key = own if own else (None, None)
    return _Pems(ca, cert, key)
