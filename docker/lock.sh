#!/usr/bin/env bash
# Writes docker/requirements.lock: every version that the image gets, resolved for its Python and platform. Needs uv.
set -euo pipefail
cd "$(dirname "$0")/.."
uv pip compile pyproject.toml --extra gpu --extra nixl --extra traces --extra deploy --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
  --no-header --no-annotate --no-emit-index-url --output-file docker/requirements.lock "$@"
