"""A gpt-oss in small that is really trained: data generator, training, evaluation and packing.

Not part of the served product; the fixture command and the tests import `tools.tiny_gpt_oss.pack` only.
The training half (`train`, `generate`, `evaluate`) needs torch and numpy but not openai-harmony.
"""
