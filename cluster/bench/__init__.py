"""A load generator against a running router (gRPC, token ids) or any OpenAI-style endpoint (HTTP, streamed completions)."""
