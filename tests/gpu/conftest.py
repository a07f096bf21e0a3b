"""Tests in this folder are of the GPU paths. Those that take `device` run the same checks twice: on a GPU, and on the CPU, where the CUDA
sources run in their emulation and the Triton kernels' twins take their place."""

import pytest
import torch

from tests.support.emulated_cuda import emulated  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))  # what libraries of a GPU host warn of when imported is not ours


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        request.getfixturevalue("emulated")
    return request.param
