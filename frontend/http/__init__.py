"""OpenAI-compatible HTTP on starlette: request models, endpoints, streams of events, keys. Knows no special token."""
