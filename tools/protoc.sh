#!/usr/bin/env bash
# Regenerates the checked-in protobuf code. Needs grpcio-tools 1.76 (an old one on purpose: newer runtimes load older code, not the reverse).
#   tools/protoc.sh [OUT_DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
"${PYTHON:-.venv/bin/python}" -m grpc_tools.protoc -I . --python_out="$out" --grpc_python_out="$out" --pyi_out="$out" \
  common/proto/types.proto common/proto/worker.proto common/proto/router.proto common/proto/control.proto common/proto/plan.proto \
  common/proto/chat.proto
rm -f "$out"/common/proto/types_pb2_grpc.py "$out"/common/proto/plan_pb2_grpc.py
