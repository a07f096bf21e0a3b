"""An upgrade keeps what the first installation made: secrets, and the replicas that an autoscaler has set."""

from __future__ import annotations

from tests.support.chart import RELEASE, render
from tests.support.fake_kubernetes import fake_kubernetes

VALUES = {"secrets": {"tokens": {"enabled": True}, "tls": {"enabled": True}}}


def test_an_upgrade_keeps_every_secret_and_the_autoscalers_replicas():
    first = render(VALUES)
    router = first.one("Deployment", "-router")
    router["spec"]["replicas"] = 7
    there = [*(document for document in first if document["kind"] == "Secret"), router]
    for document in there:
        document["metadata"]["annotations"] = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": "default"}
    with fake_kubernetes(first, there) as url:
        second = render(VALUES, "--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", url)
    secrets = {d["metadata"]["name"]: d["data"] for d in first if d["kind"] == "Secret"}
    assert len(secrets) == 4
    assert {d["metadata"]["name"]: d["data"] for d in second if d["kind"] == "Secret"} == secrets
    assert second.one("Deployment", "-router")["spec"]["replicas"] == 7
    assert second.one("Deployment", "-frontend")["spec"]["replicas"] == 2
