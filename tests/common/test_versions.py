"""A version is told, also where pip knows of none."""

from common.versions import NOT_INSTALLED, version_of


def test_what_pip_does_not_know_is_no_error():
    assert version_of("pytest").split(".")[0].isdigit()
    assert version_of("no-such-distribution") == NOT_INSTALLED
