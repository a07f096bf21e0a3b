"""As much of a Kubernetes API server as `helm template --dry-run=server` asks for: discovery, and objects to look up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Document = dict[str, Any]
NOT_FOUND = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


@contextmanager
def fake_kubernetes(known: list[Document], there: list[Document]) -> Iterator[str]:
    """Yields the URL. The server knows the kinds of `known`; each of `there` answers to GET in namespace `default`; all else is 404."""
    answers = _answers(known, there)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0].strip("/"))
            body = json.dumps(found or NOT_FOUND).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answers(known: list[Document], there: list[Document]) -> dict[str, Document]:
    """By path. https://kubernetes.io/docs/reference/using-api/api-concepts/#discovery-api"""
    kinds: dict[str, set[str]] = {}
    for document in known:
        kinds.setdefault(document["apiVersion"], set()).add(document["kind"])
    answers: dict[str, Document] = {
        "version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
        "api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    groups = []
    for version in kinds:
        group, _, name = version.rpartition("/")
        if group:
            this = {"groupVersion": version, "version": name}
            groups.append({"name": group, "versions": [this], "preferredVersion": this})
        resources = [{"name": _plural(k), "kind": k, "namespaced": True, "verbs": ["get", "list"]} for k in sorted(kinds[version])]
        answers[_root(version)] = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
    answers["apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    for item in there:
        answers[f"{_root(item['apiVersion'])}/namespaces/default/{_plural(item['kind'])}/{item['metadata']['name']}"] = item
    return answers


def _root(version: str) -> str:
    return f"apis/{version}" if "/" in version else f"api/{version}"


def _plural(kind: str) -> str:
    return f"{kind.lower().removesuffix('y')}ies" if kind.endswith("y") else f"{kind.lower()}s"
