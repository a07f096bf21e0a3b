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


TOP_LEVEL = re.compile(r"^(?P<head>[^\s#/}][^;{}]*\([^;{}]*\)(?: const)?) \{(?P<body>.*?)(?:^\}|\}$)", re.MULTILINE | re.DOTALL)
EMULATED = re.compile(r"#ifdef TANDEM_EMULATE\n.*?#else\n", re.DOTALL)


def calls_of_device_functions(text: str, included: str = "") -> set[str]:
    """Names of functions that only a GPU has, called by functions of the host. `included`: sources whose functions are known too"""
    device, host = set(), []
    for found in TOP_LEVEL.finditer(EMULATED.sub("", f"{included}\n{text}")):
        head = found["head"]
        if "__host__" in head or "__global__" in head:
            continue
        if "__device__" in head:
            device.add(re.findall(r"(\w+)\(", head)[-1 if head.count("(") == 1 else 0])
        else:
            host.append(found["body"])
    device -= {"__launch_bounds__"}
    return {name for body in host for name in device if re.search(rf"(?<![.\w]){name}(?:<[^;()]*>)?\(", body)}


@pytest.mark.parametrize("source", sorted(SOURCES.glob("*.cu")), ids=lambda path: path.name)
def test_no_function_of_the_host_calls_one_that_only_a_gpu_has(source):
    """nvcc lets a template do so, and makes the host's side of the function one that ends the process."""
    headers = "\n".join(path.read_text() for path in sorted(SOURCES.glob("*.cuh")))
    assert calls_of_device_functions(source.read_text(), headers) == set()


def test_such_a_call_is_seen():
    text = """
template <bool IS_WIDE>
__device__ __forceinline__ int rows_of(const Plan& plan) { return IS_WIDE ? 2 * plan.rows : plan.rows; }

template <bool IS_WIDE>
int start(Plan& plan) {
  if (rows_of<IS_WIDE>(plan) == 0) return 0;
  return 1;
}
"""
    assert calls_of_device_functions(text) == {"rows_of"}
    assert calls_of_device_functions(text.replace("__device__", "__host__ __device__")) == set()
