"""What Python calls in the CUDA sources can be found in the library that nvcc makes of them."""

from __future__ import annotations

import re

import pytest

from kernels.cuda_library import SOURCES

EXPORTED = re.compile(r'extern "C" [\w\s*]*?(\w+)\(([^)]*)\)', re.DOTALL)
HIDDEN = re.compile(r"namespace \{(.*?)\n\}  // namespace", re.DOTALL)
DECLARED = re.compile(r"\b(?:struct|class|enum|using) (\w+)")


@pytest.mark.parametrize("source", sorted(SOURCES.glob("*.cu")), ids=lambda path: path.name)
def test_no_exported_function_takes_a_type_of_an_unnamed_namespace(source):
    """nvcc gives such a function internal linkage, whatever `extern "C"` says; g++ exports it."""
    text = source.read_text()
    exported = EXPORTED.findall(text)
    assert exported, "a source without a function to call"
    hidden = {name for body in HIDDEN.findall(text) for name in DECLARED.findall(body)}
    for function, parameters in exported:
        assert not hidden & set(re.findall(r"\w+", parameters)), f"{function} would not be exported"
