"""The packages import one way, stay light where they must, and the checked-in protocol code is what its sources give."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "common": set(),
    "kernels": {"common"},
    "model": {"kernels", "common"},
    "kv_transfer": {"kernels", "common"},
    "prefill_worker": {"model", "kv_transfer", "kernels", "common"},
    "decode_worker": {"model", "kv_transfer", "kernels", "common"},
    "frontend": {"common"},
    "cluster": {"prefill_worker", "decode_worker", "model", "kv_transfer", "kernels", "common", "frontend"},
}


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_package_imports_upwards(package):
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / package).rglob("*.py")
        for name in imports_of(path) & (set(MAY_IMPORT) - MAY_IMPORT[package] - {package})
    }
    assert wrong == set()


def test_common_imports_neither_torch_nor_ray():
    heavy = {str(p.relative_to(ROOT)) for p in (ROOT / "common").rglob("*.py") if imports_of(p) & {"torch", "ray", "triton"}}
    assert heavy == set()


@pytest.mark.parametrize("module", ["common", "common.requests", "cluster.router", "cluster.router.main", "frontend"])
def test_light_packages_load_without_torch_ray_or_gpu_libraries(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'ray', 'triton', 'flashinfer', 'deep_gemm') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert out.stdout.strip() == "[]"


def test_kernels_is_ours_and_transformers_does_not_take_it_for_another():
    import kernels

    assert Path(kernels.__file__).parent == ROOT / "kernels"
    code = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert out.stdout.strip() == "False"


def test_checked_in_protocol_code_is_what_its_sources_give(tmp_path):
    (tmp_path / "common" / "proto").mkdir(parents=True)
    env = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    subprocess.run([ROOT / "tools" / "protoc.sh", tmp_path], check=True, env=env)
    made = sorted((tmp_path / "common" / "proto").iterdir())
    assert made, "nothing was generated"
    for path in made:
        assert path.read_text() == (ROOT / "common" / "proto" / path.name).read_text(), path.name


def test_every_module_says_what_it_owns():
    generated = {path for path in (ROOT / "common" / "proto").glob("*_pb2*.py")}
    silent = [
        str(path.relative_to(ROOT))
        for package in MAY_IMPORT
        for path in (ROOT / package).rglob("*.py")
        if path not in generated and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []
