"""Where keys come from, and that a wrong file is named without showing a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from frontend.http.auth import KEYS_ENV, load_keys


@pytest.mark.parametrize("text", ["- {key: short}", "- {name: x}", "[]", "x: 1", "- {key: long-enough, extra: 1}", "{", "- 5"])
def test_wrong_keys_files_are_named(tmp_path: Path, text: str):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.yaml"):
        load_keys(path)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_keys(tmp_path / "nowhere.yaml")


def test_keys_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEYS_ENV, "sk-environment-1, sk-environment-2")
    assert load_keys(None).caller({"authorization": "Bearer sk-environment-2"}).priority == 0
    monkeypatch.delenv(KEYS_ENV)
    assert load_keys(None).is_open
