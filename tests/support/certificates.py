"""Certificates for tests: an authority in memory that writes PEM files as an operator would, good ones and bad ones."""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.tls import Mutual, TlsFiles

HOUR = datetime.timedelta(hours=1)


class Authority:
    def __init__(self, name: str = "test CA"):
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        self._cert = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 24 * HOUR)
            .not_valid_after(now + 24 * HOUR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = self._cert.public_bytes(serialization.Encoding.PEM)

    def issue(self, *names: str, expired: bool = False) -> tuple[bytes, bytes]:
        """Returns: (certificate, key) in PEM, for these DNS names and addresses, good for one hour or over for one"""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        start, end = (now - 3 * HOUR, now - HOUR) if expired else (now - HOUR, now + HOUR)
        cert = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(end)
            .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return cert.public_bytes(serialization.Encoding.PEM), pem


@dataclass(frozen=True)
class Files:
    """One process's PEM files in a folder."""

    folder: Path

    def write(self, authority: Authority, *names: str, expired: bool = False, trust: bytes | None = None) -> Files:
        """Replaces the files, one after the other, as cert-manager's do. `trust`: other CAs to believe."""
        cert, key = authority.issue(*(names or ("127.0.0.1", "localhost")), expired=expired)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, data in (("ca.pem", trust or authority.pem), ("cert.pem", cert), ("key.pem", key)):
            temporary = self.folder / f"{name}.new"
            temporary.write_bytes(data)
            os.replace(temporary, self.folder / name)
        return self

    def tls(self, mutual: Mutual = "all", peer_name: str | None = None, *, shows_cert: bool = True) -> TlsFiles:
        cert, key = (str(self.folder / "cert.pem"), str(self.folder / "key.pem")) if shows_cert else (None, None)
        return TlsFiles(str(self.folder / "ca.pem"), cert, key, mutual, peer_name)


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
