"""A candidate's sources: the served ones, but for the files that it brings."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.candidates import overlay
from common.errors import ConfigError
from kernels import cuda_library


def test_a_variant_replaces_its_own_files_alone(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "experts.cuh").write_text("// wide\n")
    made = overlay(tmp_path / "wide", tmp_path / "all")
    assert (made / "experts.cuh").read_text() == "// wide\n"
    for path in cuda_library.SOURCES.iterdir():
        assert path.name == "experts.cuh" or (made / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "make", [lambda folder: None, lambda folder: (folder.mkdir(), (folder / "expert.cuh").touch())], ids=("absent", "misnamed")
)
def test_a_folder_that_would_change_nothing_is_refused(tmp_path: Path, make) -> None:
    make(tmp_path / "wide")
    with pytest.raises(ConfigError):
        overlay(tmp_path / "wide", tmp_path / "all")
