"""Nothing of ours turns bytes into code: no pickle in any form, no eval, no loader that runs what a file says."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "common", "kernels", "model", "kv_transfer", "prefill_worker", "decode_worker", "cluster", "frontend", "tools", "benchmarks",
    "examples",
)  # fmt: skip
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "code", "codeop"}
NAMES = {"eval", "exec", "compile", "__import__"}
METHODS = {
    ("torch", "load"), ("torch.jit", "load"), ("torch.package", "PackageImporter"), ("yaml", "load"), ("yaml", "load_all"),
    ("yaml", "unsafe_load"), ("yaml", "full_load"), ("pandas", "read_pickle"), ("ast", "literal_eval"),
    ("ray.cloudpickle", "loads"),
}  # fmt: skip
OBJECTS = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list", "recv_object_list"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def faults(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES or "pickle" in alias.name]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in MODULES or "pickle" in node.module:
                found.append(node.module)
            found += [f"{node.module}.{a.name}" for a in node.names if (node.module, a.name) in METHODS or a.name in OBJECTS | MODULES]
        elif isinstance(node, ast.Call):
            owner, _, name = dotted(node.func).rpartition(".")
            if any(k.arg == "allow_pickle" and getattr(k.value, "value", True) for k in node.keywords):
                found.append("allow_pickle")
            if (not owner and name in NAMES) or (owner, name) in METHODS or name in OBJECTS:
                found.append(f"{owner}.{name}()".lstrip("."))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_unpickles_or_evaluates(package: str):
    wrong = {str(path.relative_to(ROOT)): found for path in (ROOT / package).rglob("*.py") if (found := faults(path.read_text()))}
    assert wrong == {}


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from cloudpickle import loads", "import ray.cloudpickle as p", "x = torch.load(f)", "eval(text)", "yaml.load(f, L)",
     "from torch import load", "dist.broadcast_object_list(x)", "np.load(f, allow_pickle=True)", "from ray import cloudpickle"],
)  # fmt: skip
def test_the_check_sees_what_it_is_for(line: str):
    assert faults(line)
