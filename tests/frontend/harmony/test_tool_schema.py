"""Function tools as text: the same characters as openai-harmony writes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from openai_harmony import DeveloperContent, Message, Role, ToolDescription

from common.errors import InvalidRequestError
from frontend.harmony.tool_schema import MAX_DEPTH, format_function_tools
from frontend.vocab import Vocabulary

_WORDS = ("The city", "a\nb", "x\r\ny", "null", "😀", "", "'; drop", '"q"', "tab\t", "end\n", "\u2028 sep", "<|end|>")
_DEFAULTS = ("a", 1, 1.5, True, None, {"k": [1, "é"]}, 1e20, 1e-7, [], 12345678901234567890, -0.0, "celsius", 0.1)


def random_schema(source: random.Random, depth: int = 0) -> Any:
    schema: dict[str, Any] = {}
    for key, chance, values in (
        ("description", 0.4, (*_WORDS, 3)),
        ("default", 0.3, _DEFAULTS),
        ("nullable", 0.2, (True, False, "yes")),
        ("title", 0.2, _WORDS),
        ("examples", 0.2, (["a", 1, "b"], [], "x")),
    ):
        if source.random() < chance:
            schema[key] = source.choice(values)
    kind = source.random()
    if kind < 0.25 and depth < 5:
        schema["type"] = "object"
        if source.random() < 0.9:
            names = [source.choice("abcdefgh") * source.randint(1, 3) for _ in range(source.randint(0, 4))]
            schema["properties"] = {name: random_schema(source, depth + 1) for name in names}
        if source.random() < 0.6:
            schema["required"] = source.choice((["a", "bb"], ["c", 1], "a"))
    elif kind < 0.4 and depth < 5:
        schema |= {"type": "array"} | ({"items": random_schema(source, depth + 1)} if source.random() < 0.8 else {})
    elif kind < 0.55 and depth < 5:
        schema["oneOf"] = source.choice(([random_schema(source, depth + 1) for _ in range(source.randint(0, 3))], "x"))
        schema |= {"type": "string"} if source.random() < 0.3 else {}
    elif kind < 0.62:
        schema["type"] = source.choice((["integer", "string"], ["number", "null"], [], [1]))
    elif kind < 0.7:
        return source.choice(({"$ref": "#/x"}, True, 5, "str", None, []))
    elif kind < 0.85:
        schema["type"] = "string"
        if source.random() < 0.5:
            schema["enum"] = source.choice((["celsius", "fahrenheit"], [1, 2], [], ["a", 1]))
    else:
        schema["type"] = source.choice(("integer", "number", "boolean", "null", "weird"))
        schema |= {"enum": [1, 2]} if source.random() < 0.3 else {}
    return schema


def written_by_library(vocabulary: Vocabulary, tools: list[dict[str, Any]]) -> str:
    descriptions = [ToolDescription.new(tool["name"], tool["description"], tool["parameters"]) for tool in tools]
    content = DeveloperContent.new().with_function_tools(descriptions)
    ids = vocabulary.harmony.render(Message.from_role_and_content(Role.DEVELOPER, content))
    return vocabulary.harmony.decode_utf8(ids).removeprefix("<|start|>developer<|message|>").removesuffix("<|end|>")


def test_text_equals_the_librarys_for_random_schemas(vocabulary: Vocabulary):
    source = random.Random(4)
    for _ in range(3_000):
        schemas = [source.choice((None, random_schema(source))) for _ in range(source.randint(1, 3))]
        tools = [
            {"name": source.choice(("f", "get_weather")), "description": source.choice(_WORDS), "parameters": schema}
            for schema in schemas
            if schema is None or isinstance(schema, dict)
        ]
        assert format_function_tools(tools) == written_by_library(vocabulary, tools), tools


def test_no_tools_give_the_librarys_empty_section(vocabulary: Vocabulary):
    assert format_function_tools([]) == written_by_library(vocabulary, [])


@pytest.mark.parametrize(
    "wrap", [lambda s: {"type": "array", "items": s}, lambda s: {"type": "object", "properties": {"a": s}}, lambda s: {"oneOf": [s]}]
)
def test_schemas_nested_too_deep_are_refused_by_name(wrap):
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(MAX_DEPTH):
        schema = wrap(schema)
    assert format_function_tools([{"name": "f", "parameters": schema}])
    with pytest.raises(InvalidRequestError, match=r"tools\[1\]\.function\.parameters"):
        format_function_tools([{"name": "f"}, {"name": "g", "parameters": wrap(schema)}])
