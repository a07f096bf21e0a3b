"""What the command line shows to routers and controllers: certificates of the cluster that runs here, or those that the environment names.

Secrets and identities come from the environment alone: TANDEM_TOKEN, and for TLS TANDEM_CA_FILE, TANDEM_CERT_FILE, TANDEM_CERT_KEY_FILE
and TANDEM_PEER_NAME.
"""

from __future__ import annotations

import os

from cluster.specs import security_of
from cluster.state import state_dir
from common.config import load_config
from common.tls import TlsFiles
from common.wire import Security, Wire


def client_wire(name: str) -> Wire:
    """`name`: of a cluster of this machine, whose certificates are taken if the environment names none.

    Raises: ConfigError if a file can't be used
    """
    return Wire(Security(tls=_tls_of_environment() or _tls_of_cluster(name)), token=os.environ.get("TANDEM_TOKEN", ""))


def _tls_of_environment() -> TlsFiles | None:
    ca = os.environ.get("TANDEM_CA_FILE")
    if not ca:
        return None
    cert, key = os.environ.get("TANDEM_CERT_FILE") or None, os.environ.get("TANDEM_CERT_KEY_FILE") or None
    return TlsFiles(ca, cert, key, peer_name=os.environ.get("TANDEM_PEER_NAME") or None)


def _tls_of_cluster(name: str) -> TlsFiles | None:
    config = state_dir(name) / "config.json"
    return security_of(load_config(config)).tls if config.exists() else None
