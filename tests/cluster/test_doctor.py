"""What the doctor finds: each fault of a configuration is named, with what to do; a sound one passes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import diagnose  # noqa: F401 - registers the command
from cluster.cli.app import app
from cluster.doctor import CHECKS, Finding, Level, examine
from common.config import Config, parse_config
from tests.support.certificates import Authority, Files


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    from model.fixture import write_random_fixture

    path = tmp_path_factory.mktemp("doctor") / "tiny"
    write_random_fixture(path, vocab_size=1024)
    return path


def config_of(checkpoint: Path, **changes) -> Config:
    pools = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]
    tree = {"model": {"path": str(checkpoint), "max_model_len": 2048}, "pools": pools, "router": {"listen": "127.0.0.1:0"}}
    return parse_config(tree | changes)


def found(config: Config | None, check: str) -> list[Finding]:
    return [finding for finding in examine(config) if finding.check == check]


def test_a_sound_configuration_has_no_failure(checkpoint: Path):
    findings = examine(config_of(checkpoint))
    assert [f for f in findings if f.level is Level.FAIL] == []
    assert {"driver", "NCCL", "peer access", "transport shm", "transport tcp", "ports", "weights", "clock"} <= {f.check for f in findings}
    assert all(f.action for f in findings if f.level is Level.WARN), "a warning says what to do"


def test_missing_or_unfit_weights_are_named(checkpoint: Path, tmp_path: Path):
    (finding,) = found(config_of(tmp_path / "none"), "weights")
    assert finding.level is Level.FAIL
    assert "none" in finding.found
    assert "model.path" in finding.action
    (finding,) = found(config_of(checkpoint, model={"path": str(checkpoint), "max_model_len": 10_000_000}), "weights")
    assert finding.level is Level.FAIL
    assert "max_model_len" in finding.found


def test_a_taken_port_is_named_with_its_key(checkpoint: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = config_of(checkpoint, router={"listen": f"127.0.0.1:{server.getsockname()[1]}"})
        taken = [f for f in found(config, "ports") if f.level is Level.WARN]
    assert len(taken) == 1
    assert "router.listen" in taken[0].found


def test_secrets_that_everybody_can_read_and_old_certificates_are_named(checkpoint: Path, tmp_path: Path):
    files = Files(tmp_path / "tls").write(Authority(), expired=True)
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "key").chmod(0o644)
    tls = {name: str(files.folder / f"{name.removesuffix('_file')}.pem") for name in ("ca_file", "cert_file", "key_file")}
    config = config_of(checkpoint, cluster={"key_file": str(tmp_path / "key")}, security={"tls": tls})
    (certificate,) = found(config, "certificate")
    assert certificate.level is Level.FAIL
    assert any(f.level is Level.WARN and "chmod 600" in f.action for f in found(config, "secrets"))


def test_a_router_that_others_reach_without_a_guard_is_a_warning(checkpoint: Path):
    (finding,) = found(config_of(checkpoint, router={"listen": "0.0.0.0:50051"}), "security")
    assert finding.level is Level.WARN
    assert "security.tls" in finding.action


def test_one_check_that_breaks_does_not_hide_the_others(checkpoint: Path, monkeypatch):
    def broken(config):
        raise OSError("no /dev/shm")
        yield

    monkeypatch.setitem(CHECKS, "transports", broken)
    findings = examine(config_of(checkpoint))
    assert [f for f in findings if f.level is Level.FAIL] == [Finding("transports", Level.FAIL, "no /dev/shm", "")]
    assert any(f.check == "weights" and f.level is Level.OK for f in findings)


def test_the_command_exits_with_1_when_something_fails(checkpoint: Path, tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(config_of(checkpoint).model_dump_json())
    assert CliRunner().invoke(app, ["doctor", "--config", str(file)]).exit_code == 0
    result = CliRunner().invoke(app, ["doctor", "--config", str(file), "--set", f"model.path={tmp_path}/none"])
    assert result.exit_code == 1
    assert "weights" in result.output
