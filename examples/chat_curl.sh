#!/usr/bin/env bash
# The HTTP API with curl alone: models, a whole answer with its route, a stream.
#   examples/chat_curl.sh [http://127.0.0.1:8000]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
key=${TANDEM_API_KEY:-unused}

post() {
  curl -sSN --fail-with-body "$url$1" -H "authorization: Bearer $key" -H "content-type: application/json" "${@:2}"
}

curl -sS --fail-with-body "$url/v1/models" -H "authorization: Bearer $key"
echo
model=$(curl -sS "$url/v1/models" -H "authorization: Bearer $key" | sed -E 's/.*"data":\[\{"id":"([^"]*)".*/\1/')

# Whole, with the route decision in the body: candidates, scores, what was predicted and what it took.
post /v1/chat/completions -H "x-tandem-include-route: true" -d "{\"model\": \"$model\", \"max_completion_tokens\": 64,
  \"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}"
echo

# Streamed, saving money rather than time.
post /v1/chat/completions -H "x-tandem-latency-weight: 0.1" -d "{\"model\": \"$model\", \"max_completion_tokens\": 64, \"stream\": true,
  \"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}"

# Token ids in, text and token ids out, without any chat format.
post /v1/completions -d "{\"model\": \"$model\", \"prompt\": [13225, 11], \"max_tokens\": 8, \"return_token_ids\": true}"
echo
