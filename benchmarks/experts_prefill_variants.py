"""Where the time of the prefill experts goes: copies of the source with one thing taken out, timed at 120b, 8,192 tokens. Results are wrong."""

import ctypes
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.experts_prefill import ALIGNMENT, Experts, round_us
from kernels import cuda_library

PRODUCT = "        for (int i = 0; i < 4; i++) product<N>("
VARIANTS = {
    "as it is": [],
    "without factors": [("ahead.apply_all(", "if (blocks < 0) ahead.apply_all(")],
    "without epilogues": [("    multiply<N, 2>(s, stage, sum, warpgroup, plan.blocks);\n", "    multiply<N, 2>(s, stage, sum, warpgroup, plan.blocks);\n    if (plan.blocks > 0 && sum[0][0] != 1234.5f) continue;\n"),
                          ("  const int group = tile.row_block * WARPGROUPS + warpgroup;\n", "  if (plan.blocks > 0) return;\n  const int group = tile.row_block * WARPGROUPS + warpgroup;\n"),
                          ("  for (int h = 0; h < 2; h++) {\n    const int column = row", "  for (int h = 0; h < 2; h++) {\n    if (plan.blocks > 0 && sum[h][0] != 1234.5f) continue;\n    const int column = row")],
    "blocks alone, no cluster": [("CLUSTER = 2", "CLUSTER = 1")],
    "late 128": [("LATE = 32", "LATE = 128")],
    "late 1": [("LATE = 32", "LATE = 1")],
    "3 stages": [("STAGES = 4", "STAGES = 3")],
    "at most 96 tokens": [("MAX_WIDTH = 152", "MAX_WIDTH = 96"), (", 104, 112, 120, 128, 136, 144, 152};", "};")],
    "at most 128 tokens": [("MAX_WIDTH = 152", "MAX_WIDTH = 128"), (", 136, 144, 152};", "};")],
    "same 128 weight columns": [("plan.weights, 128 * k,", "plan.weights, 0,")],
    "no copies": [("barrier_expect(full, parts * ROWS * 128 + width * 128);", "if (plan.blocks > 0) { barrier_expect(full, 0); stage.turn++; continue; }\n        barrier_expect(full, parts * ROWS * 128 + width * 128);")],
    "no products": [(PRODUCT, "        if (blocks < 0)\n" + PRODUCT)],
}


def build(item):
    name, edits = item
    text = (cuda_library.SOURCES / "experts_prefill.cu").read_text()
    for old, new in edits:
        assert old in text, (name, old)
        text = text.replace(old, new)
    digest = hashlib.sha256(text.encode() + (cuda_library.SOURCES / "hopper.cuh").read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / "tandem-variants" / digest
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "v.cu").write_text(text)
    if (folder / "v.so").exists():
        return name, folder / "v.so", []
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    target = folder / "new.so"
    done = subprocess.run([nvcc, *cuda_library.FLAGS, f"-I{cuda_library.SOURCES}", "-Xptxas", "-v", str(folder / "v.cu"), "-o", str(target)], capture_output=True, text=True)
    notes = [line.strip()[:80] for line in (done.stdout + done.stderr).splitlines() if "C75" in line or ("spill" in line and "0 bytes spill stores" not in line) or "error" in line]
    if done.returncode == 0:
        target.rename(folder / "v.so")
    return name, folder / "v.so" if done.returncode == 0 else None, notes


def main():
    out = Path(sys.argv[1])
    report = (out / "variants.txt").open("a")

    def say(line):
        print(line, flush=True)
        report.write(line + "\n")
        report.flush()

    with ThreadPoolExecutor(12) as pool:
        built = list(pool.map(build, VARIANTS.items()))
    if len(sys.argv) > 2:
        for name, _, notes in built:
            print(name, notes)
        return
    experts = Experts("120b", int(time.time()))
    rows = experts.rows(8192, experts.routing(8192), ALIGNMENT)
    original = cuda_library.load
    for name, target, notes in built:
        if target is None:
            say(f"{name:26s} not built {notes}")
            continue
        library = ctypes.CDLL(str(target))
        cuda_library.load = lambda _, library=library: library
        us = round_us(experts.steps_of_ours(rows))
        say(f"{name:26s} " + ", ".join(f"{k} {v:.0f} us" for k, v in us.items()) + f" {notes or ''}")
    cuda_library.load = original
    us = round_us(experts.steps_of_theirs(experts.rows(8192, experts.routing(8192), 128)))
    say(f"{'DeepGEMM':26s} " + ", ".join(f"{k} {v:.0f} us" for k, v in us.items()))


main()
