"""Versions of what is installed, told also where something runs from its sources."""

from __future__ import annotations

import importlib.metadata

NOT_INSTALLED = "not installed"


def version_of(distribution: str) -> str:
    """Returns: its version, or `NOT_INSTALLED` if pip knows nothing of it, as of a checkout that is only on the path"""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED
