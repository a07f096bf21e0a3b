"""The command line against the real local cluster, as an operator types it, and its errors in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest


def tandem(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("up", "--config", "absent.yaml"), "absent.yaml"),
        (("generate", "--router", "127.0.0.1:1", "--input-ids", "1,x"), "--input-ids"),
        (("tables", "absent.json"), "absent.json"),
        (("fixture", "random", "."), "not empty"),
        (("down", "--name", "nobody-has-this-name"), "nobody-has-this-name"),
    ],
    ids=lambda v: v[0] if isinstance(v, tuple) else "",
)
def test_an_error_is_one_line_and_a_code(args, says):
    result = tandem(*args)
    assert result.returncode in (1, 2)
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_debug_shows_where_it_came_from():
    assert "Traceback" in tandem("--debug", "up", "--config", "absent.yaml").stderr


def test_the_vocabulary_can_be_written_for_hosts_that_have_none(tmp_path):
    from frontend.vocab import find_vocabulary

    assert tandem("fixture", "vocabulary", str(tmp_path / "v")).returncode == 0
    assert find_vocabulary(tmp_path / "v").parent == tmp_path / "v"


@pytest.mark.slow
def test_generate_status_and_route_speak_to_the_router(local_cluster):
    router = ("--router", local_cluster.router)
    answer = tandem("generate", *router, "--input-ids", "5,6,7", "--max-tokens", "4", "--ignore-eos", "--explain")
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.split()) == 4
    assert "chosen" in answer.stderr
    status = tandem("status", *router).stdout
    assert all(pool in status for pool in ("prefill-tp1", "prefill-tp2", "decode-ep4"))
    assert "chosen" in tandem("route", *router, "--prompt-tokens", "100").stdout


@pytest.mark.slow
def test_sweep_writes_a_profile_that_tables_shows(local_cluster, tmp_path):
    path = str(tmp_path / "cpu.json")
    options = ("--router", local_cluster.router, "--out", path, "--hardware", "CPU", "--prefill-tokens", "16,64", "--batches", "1,2")
    options += ("--contexts", "32", "--runs", "2", "--steps", "8")
    dry = tandem("sweep", *options, "--dry-run")
    assert "6 cells" in dry.stdout, dry.stderr
    swept = tandem("sweep", *options, "--price", "7")
    assert swept.returncode == 0, swept.stderr
    assert "$7.00 per GPU-hour" in swept.stdout
    alone = tandem("sweep", *options, "--role", "prefill")
    assert alone.returncode == 0, alone.stderr
    assert "4 cells" in alone.stdout
    assert "| TP1 mxfp4 |" in tandem("tables", path, "--contexts", "32").stdout


@pytest.mark.slow
def test_chat_answers_each_line_of_a_pipe(trained_router):
    result = tandem("chat", "--router", trained_router, "--effort", "low", stdin="Bonjour!\nHello, I am Sara from Berlin.\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["Bonjour! Comment puis-je aider?", "Hello Sara! How is Berlin today?"]
    assert result.stderr.count("TTFT") == 2
