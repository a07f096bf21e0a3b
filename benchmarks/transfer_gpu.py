"""KV transfer between two GPUs of one host: builds, checks every byte, breaks things, then measures; a short table last.

    python -m benchmarks.transfer_gpu [--out FOLDER] [--only PART ...] [--gpus 0 1] [--victims 500] [--seconds 190]

Every group is a process that sees one GPU only, as Ray gives it one; groups of several ranks hold all of them in that process. Parts are
guarded: one that fails or hangs prints the end of its traceback, and the others go on with fresh processes. Figures come first, since
`--seconds` may end the run. Needs two GPUs (`--gpus 0 0`: one, which checks bytes and faults and whose rates say nothing), nvcc, torch.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.transfer_gpu_faults import FaultMatrix
from benchmarks.transfer_gpu_groups import Child
from kernels import cuda_library
from kv_transfer.transports import nixl

PROMPT = 8192
PART_S = 25.0
LONGER_PARTS_S = {"every pair": 40.0, "race": 40.0} | {f"faults {name}": 90.0 for name in ("cuda_ipc", "nccl", "tcp", "nixl")}
FIRST_COMPILE = ("kv_copy", "device_memory")
TIMING, RACE, COMMIT = (f"benchmarks.transfer_gpu_{name}" for name in ("timing", "race", "commit"))


class PartTimeout(Exception):
    """A part took longer than it may."""


def _out_of_time(number: int, frame: object) -> None:
    raise PartTimeout


class Bench:
    """The two groups that most parts use, the parts, and what they found."""

    def __init__(self, out: Path, victims: int, seconds: float, gpus: tuple[int, int], commit: str):
        self.out, self.victims, self.gpus = out, victims, gpus
        self.ends_at = time.monotonic() + seconds
        self.context = multiprocessing.get_context("spawn")
        self.lines: list[str] = []
        self.records: list[dict] = []
        self.failed: list[str] = []
        self.transfer_id = 100
        device = f"{len(set(gpus))} x NVIDIA H200"
        self.stamp = {"date": datetime.date.today().isoformat(), "device": device, "commit": commit}
        self.children: list[Child] = []
        self.prefill, self.decode = self.start(0), self.start(1)
        self.standby = [self.start(0), self.start(1)]
        signal.signal(signal.SIGALRM, _out_of_time)

    def start(self, side: int) -> Child:
        """side: 0 prefill, 1 decode"""
        self.children.append(Child(self.context, self.gpus[side]))
        return self.children[-1]

    def ready(self) -> str:
        """Waits for the groups of the first parts. Returns: names of the GPUs"""
        return ", ".join(child.ready().device for child in (self.prefill, self.decode, *self.standby))

    def next_id(self) -> int:
        self.transfer_id += 1
        return self.transfer_id

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def part(self, name: str, run: Callable[[], None]) -> None:
        began = time.monotonic()
        limit_s = min(LONGER_PARTS_S.get(name, PART_S), self.ends_at - began)
        if limit_s < 2:
            self.failed.append(name)
            self.say(f"{name}: not reached in the time of the run")
            return
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            for child in (self.prefill, self.decode):
                child.ask("drop")
            run()
        except Exception:  # noqa: BLE001 the other parts go on
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.failed.append(name)
            self.say(f"{name}: FAILED after {time.monotonic() - began:.1f} s\n{traceback.format_exc()[-1800:]}")
            self.revive()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.save()
        print(f"  [{name}: {time.monotonic() - began:.1f} s]", flush=True)

    def revive(self) -> None:
        """Groups that a failed part may have left in any state are replaced."""
        for child in (self.prefill, self.decode):
            child.kill()
        (self.prefill, self.decode), self.standby = self.standby, [self.start(0), self.start(1)]

    def record(self, transport: str, tp_from: int, tp_to: int, nbytes: int, gb_per_s: float, plain: float, **more: object) -> None:
        fields = {"transport": transport, "tp_from": tp_from, "tp_to": tp_to, "bytes": nbytes, "gb_per_s": round(gb_per_s, 2)}
        self.records.append(fields | {"plain_copy_gb_per_s": round(plain, 2)} | self.stamp | more)

    # -- checks ------------------------------------------------------------------------------------------------------------------------

    def equal(self, tokens: int, *, transport: str = "cuda_ipc") -> None:
        """One transfer between the open groups, checked byte for byte and by digest."""
        transfer_id = self.next_id()
        reservation = self.decode.ask("reserve", transfer_id, tokens)
        result = self.prefill.ask("hand_over", reservation, transfer_id)
        if result["error"]:
            raise AssertionError(f"{transport}, {tokens} tokens: {result['error']}")
        difference = self.decode.ask("difference", transfer_id, transfer_id, alone=True)
        found = self.decode.ask("verify", transfer_id)
        if difference or found != result["digests"]:
            raise AssertionError(f"{transport}, {tokens} tokens: {difference or 'bytes equal, digests not'}: {found} {result['digests']}")
        self.decode.ask("release", transfer_id)

    def every_pair(self) -> None:
        prompts = (1, 15, 17, 127, 129, 1000, 1025)
        count = 0
        for tp_to in (1, 2, 4):
            self.prefill.ask("drop")
            self.decode.ask("decode", tp=tp_to, layers=6, num_blocks=(80, 24))
            for tp_from, tokens in itertools.product((1, 2, 4, 8), prompts):
                if (tp_from + tp_to + tokens) % 2 and tokens not in (129, 1000):
                    continue
                self.prefill.ask("prefill", tp=tp_from, layers=6, num_tokens=tokens)
                self.equal(tokens)
                count += 1
        self.say(f"bytes and digests equal: cuda_ipc, {count} transfers, TP 1 2 4 8 -> 1 2 4")

    def race(self) -> None:
        address = tempfile.mktemp(prefix="tandem-race-")
        self.decode.tell("call", RACE, "race_decode", address)
        self.prefill.tell("call", RACE, "race_prefill", address, self.victims)
        errors, found = self.prefill.answer(), self.decode.answer()
        count = sum(found["outcome"].values())
        self.say(f"race: {count} victims, {found['outcome']}, WRONG {len(found['wrong'])}, blocks not free {found['not_free']}, "
                 f"written while free {found['changed']}, still open {found['open']}; writers: {errors}")  # fmt: skip
        if found["wrong"]:
            self.say("\n".join(found["wrong"][:3]))

    # -- figures -----------------------------------------------------------------------------------------------------------------------

    def open_long(
        self, tp_to: int = 1, tokens: int = PROMPT, transport: str = "cuda_ipc", transports: tuple[str, ...] = ("cuda_ipc",)
    ) -> None:
        self.prefill.ask("prefill", tp=1, layers=36, num_tokens=tokens, transport=transport)
        self.decode.ask("decode", tp=tp_to, layers=36, num_blocks=(600, 40), transports=transports, incarnation=self.next_id())

    def kernel(self) -> None:
        self.open_long()
        handle = self.decode.ask("plain_memory", 320 << 20)
        for heads in (8, 4, 1):
            rows = self.prefill.ask("call", TIMING, "kernel_blocks", handle, heads)
            text = ", ".join(f"{blocks}: {peer:.0f} ({alone:.0f})" for blocks, peer, alone in rows)
            self.say(f"kernel, {heads} of 8 heads, GB/s to the peer (digest alone) by thread blocks: {text}")

    def rate(self, transport: str, tp_to: int) -> None:
        self.open_long(tp_to, transport=transport, transports=(transport,))
        handle = self.decode.ask("plain_memory", 320 << 20)
        reservation = self.decode.ask("reserve", self.next_id(), PROMPT)
        got = self.prefill.ask("call", TIMING, "rates", reservation, handle, transport)
        gb = [got["bytes"] / got[name] / 1e6 for name in ("link_ms", "plain_ms")]
        self.say(f"{transport} TP1 -> TP{tp_to}, {got['bytes'] / 1e6:.0f} MB: {gb[0]:.0f} GB/s, {got['link_ms']:.3f} ms; plain copy "
                 f"{gb[1]:.0f} GB/s; ratio {got['ratio']:.1%}")  # fmt: skip
        self.record(transport, 1, tp_to, got["bytes"], *gb, ratio=round(got["ratio"], 3))

    def checked(self, transport: str) -> None:
        """Bytes over another transport, some pairs."""
        for tp_from, tp_to, tokens in ((1, 1, 1000), (2, 1, 129), (1, 2, 1025), (4, 2, 17)):
            self.prefill.ask("drop")
            self.decode.ask("decode", tp=tp_to, layers=6, num_blocks=(80, 24), transports=(transport,), incarnation=self.next_id())
            self.prefill.ask("prefill", tp=tp_from, layers=6, num_tokens=tokens, transport=transport)
            self.equal(tokens, transport=transport)
        self.say(f"bytes and digests equal: {transport}, 4 transfers")

    def nccl_rates(self) -> None:
        for nbytes in (16 << 20, 64 << 20, 256 << 20):
            pair_id = self.prefill.ask("call", TIMING, "new_pair_id")
            self.decode.tell("call", TIMING, "nccl_receive", pair_id, nbytes, 8)
            own = self.prefill.ask("call", TIMING, "nccl_plain", pair_id, nbytes, 8)
            self.decode.answer()
            self.say(f"nccl's own send and receive of {nbytes >> 20} MiB: {own:.0f} GB/s")
        self.rate("nccl", 1)

    def faults(self, transport: str) -> None:
        if transport == "nixl" and not nixl.is_installed():
            self.say("nixl: not installed here")
            return
        FaultMatrix(self, transport).run()

    def auto(self) -> None:
        offered = ("cuda_ipc", "nccl", *(("nixl",) if nixl.is_installed() else ()), "tcp")
        self.decode.ask("decode", tp=1, layers=6, num_blocks=(80, 24), transports=offered, incarnation=self.next_id())
        self.prefill.ask("prefill", tp=1, layers=6, num_tokens=1000, transport="auto")
        self.equal(1000, transport="auto")
        self.say(f"auto among {', '.join(offered)}: {self.prefill.ask('chosen')}")

    def nixl(self) -> None:
        if not nixl.is_installed():
            self.say("nixl: not installed here")
            return
        self.checked("nixl")
        self.rate("nixl", 1)

    def hand_over_ms(self, tokens: int) -> None:
        self.open_long(tokens=tokens)
        reservations = []
        for _ in range(8):
            reservations.append(self.decode.ask("reserve", self.next_id(), tokens))
            self.decode.ask("release", self.transfer_id, poison=False)
        got = self.prefill.ask("call", TIMING, "sender_ms", reservations)
        self.say(f"{tokens} tokens by the sender, first push to last ack: {got['push_to_ack_ms']:.3f} ms; begin {got['begin_ms']:.3f} ms")
        transfer_id = self.next_id()
        self.decode.ask("reserve", transfer_id, tokens)
        self.say(f"{tokens} tokens, check at commit (digest of all layers): {self.decode.ask('verify_ms', transfer_id):.3f} ms")

    def commit(self) -> None:
        for tokens in (PROMPT, 1024):
            got = self.decode.ask("call", COMMIT, "commit_to_step", tokens)
            self.say(f"{tokens} tokens, commit to first decode step: {got['to_step_ms']:.3f} ms (worst {got['to_step_worst_ms']:.3f}); "
                     f"with a step of one small kernel and its token told: {got['to_token_ms']:.3f} ms")  # fmt: skip
            self.records.append({"commit_to_step": got, "tokens": tokens})

    def overlap(self, tokens: int, total_ms: float, graph: bool) -> None:
        self.open_long(tokens=tokens)
        reservations = []
        for _ in range(7):
            reservations.append(self.decode.ask("reserve", self.next_id(), tokens))
            self.decode.ask("release", self.transfer_id, poison=False)
        got = self.prefill.ask("call", TIMING, "overlap", reservations, total_ms, graph)
        place = "behind" if graph else "during"
        late = f"{got['last_byte_after_ms']:.3f} ms after its end (worst {got['last_byte_after_worst_ms']:.3f})"
        self.say(f"{tokens} tokens, push {place} a load of {got['alone_ms']:.1f} ms: {got['slower']:+.2%}; last byte {late}; "
                 f"host time of enqueueing {got['host_ms']:.1f} ms")  # fmt: skip
        self.records.append({"overlap": got, "tokens": tokens, "graph": graph})

    def save(self) -> None:
        (self.out / "transfer_gpu.json").write_text(json.dumps(self.records, indent=1) + "\n")

    def close(self) -> None:
        for child in self.children:
            child.kill()
        self.save()
        print("\n== summary ==")
        print("\n".join(self.lines))
        print(f"failed parts: {', '.join(self.failed) or 'none'}", flush=True)


def parts(bench: Bench) -> dict[str, Callable[[], None]]:
    return {
        "cuda_ipc TP1": lambda: bench.rate("cuda_ipc", 1),
        "cuda_ipc TP2": lambda: bench.rate("cuda_ipc", 2),
        "8192 tokens": lambda: bench.hand_over_ms(PROMPT),
        "1024 tokens": lambda: bench.hand_over_ms(1024),
        "overlap": lambda: bench.overlap(PROMPT, 100.0, False),
        "overlap 1024": lambda: bench.overlap(1024, 20.0, True),
        "commit": bench.commit,
        "kernel": bench.kernel,
        "every pair": bench.every_pair,
        "nccl": lambda: bench.checked("nccl"),
        "nccl rates": bench.nccl_rates,
        "race": bench.race,
        "auto": bench.auto,
        "nixl": bench.nixl,
        "tcp": lambda: bench.checked("tcp"),
        **{f"faults {name}": partial(bench.faults, name) for name in ("cuda_ipc", "nccl", "tcp", "nixl")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder for the records")
    parser.add_argument("--only", nargs="+", help="names of parts")
    parser.add_argument("--victims", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=190.0, help="after which parts are not begun")
    parser.add_argument("--gpus", nargs=2, type=int, default=(0, 1), metavar=("PREFILL", "DECODE"))
    parser.add_argument("--commit", default="", help="of the code, for the records; the repository's own if there is one")
    arguments = parser.parse_args()
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # a pair has no use for multicast
    began = time.monotonic()
    cuda_library.build_all(FIRST_COMPILE)
    print(f"compiled: {time.monotonic() - began:.1f} s", flush=True)
    left_s = arguments.seconds - (time.monotonic() - began)
    bench = Bench(arguments.out, arguments.victims, left_s, tuple(arguments.gpus), arguments.commit or found)
    print(f"GPUs: {bench.ready()}; ready after {time.monotonic() - began:.1f} s", flush=True)
    chosen = {name: run for name, run in parts(bench).items() if arguments.only is None or name in arguments.only}
    try:
        for name, run in chosen.items():
            bench.part(name, run)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
