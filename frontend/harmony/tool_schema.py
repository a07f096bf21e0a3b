"""Writes function tools as the TypeScript-like text that gpt-oss was trained on.

Owns the text only: the same characters as openai-harmony 0.0.8 gives (tests compare them), but made here, because the
library would encode a long description in quadratic time. Called by `frontend.harmony.conversation`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequestError

MAX_DEPTH = 48  # nested schemas; openai-harmony itself fails at about 55
_EXPONENT = re.compile(r"e([+-])0*(\d+)")
_SIMPLE_TYPES = {"number": "number", "integer": "number", "boolean": "boolean"}


def format_function_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The `# Tools` section of a developer message.

    `tools`: dicts with `name`, and optionally `description` and `parameters` (a JSON schema).
    Raises: InvalidRequestError if a schema is nested more than MAX_DEPTH deep.
    Source: openai-harmony 0.0.8, `template_tools_section` and `json_schema_to_typescript`.
    """
    lines = ["## functions\n"]
    if tools:
        lines.append("namespace functions {\n")
        for index, tool in enumerate(tools):
            lines += [f"// {line}" for line in _lines(tool.get("description") or "")]
            parameters = tool.get("parameters")
            argument = "" if parameters is None else f"_: {_Schema(f'tools[{index}].function.parameters').write(parameters, '', 0)}"
            lines.append(f"type {tool['name']} = ({argument}) => any;\n")
        lines.append("} // namespace functions")
    return "# Tools\n\n" + "\n".join(lines)


class _Schema:
    def __init__(self, field: str):
        self._field = field

    def write(self, schema: Any, indent: str, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise InvalidRequestError(self._field, f"the schema is nested more than {MAX_DEPTH} deep")
        if not isinstance(schema, Mapping):
            return "any"
        if isinstance(schema.get("oneOf"), list):
            return "".join(f"\n{indent} | {self._variant(variant, indent, depth)}{_trailing(variant)}" for variant in schema["oneOf"])
        kind = schema.get("type")
        if isinstance(kind, list):
            names = ["number" if name == "integer" else name for name in kind if isinstance(name, str)]
            return " | ".join(names) if names else "any"
        if kind == "object":
            return self._object(schema, indent, depth)
        if kind == "array":
            return f"{self.write(schema['items'], indent, depth + 1)}[]" if "items" in schema else "Array<any>"
        if kind == "string":
            choices = schema.get("enum")
            names = [f'"{choice}"' for choice in choices if isinstance(choice, str)] if isinstance(choices, list) else []
            return " | ".join(names) if names else "string"
        return _SIMPLE_TYPES.get(kind, "any") if isinstance(kind, str) else "any"

    def _variant(self, variant: Any, indent: str, depth: int) -> str:
        return _nullable(variant, self.write(variant, f"{indent}   ", depth + 1))

    def _object(self, schema: Mapping[str, Any], indent: str, depth: int) -> str:
        out = []
        if isinstance(schema.get("description"), str):
            out.append(f"{indent}// {schema['description']}\n")
        out.append("{\n")
        properties = schema.get("properties")
        required = schema.get("required")
        names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        for key, value in properties.items() if isinstance(properties, Mapping) else ():
            out += self._property(key, value, indent, depth, is_required=key in names)
        out.append(f"{indent}}}")
        return "".join(out)

    def _property(self, key: str, value: Any, indent: str, depth: int, *, is_required: bool) -> list[str]:
        mark = "" if is_required else "?"
        if not isinstance(value, Mapping):
            return [f"{indent}{key}{mark}: any,\n"]
        out = []
        if isinstance(value.get("title"), str):
            out.append(f"{indent}// {value['title']}\n{indent}//\n")
        if "oneOf" not in value and isinstance(value.get("description"), str):
            out.append(f"{indent}// {value['description']}\n")
        examples = value.get("examples")
        if isinstance(examples, list) and examples:
            out.append(f"{indent}// Examples:\n")
            out += [f'{indent}// - "{example}"\n' for example in examples if isinstance(example, str)]
        if isinstance(value.get("oneOf"), list):
            return out + self._one_of_property(key, value, indent, depth, mark)
        text = _nullable(value, self.write(value, f"{indent}    ", depth + 1))
        default = f" // {_default(value)}" if "default" in value and "oneOf" not in value else ""
        return [*out, f"{indent}{key}{mark}: {text},{default}\n"]

    def _one_of_property(self, key: str, value: Mapping[str, Any], indent: str, depth: int, mark: str) -> list[str]:
        variants = value["oneOf"]
        described = value.get("description") if isinstance(value.get("description"), str) else None
        first = variants[0].get("description") if variants and isinstance(variants[0], Mapping) else None
        is_above = described is not None and described != first
        out = [f"{indent}// {described}\n"] if is_above else []
        if "default" in value:
            out.append(f"{indent}// {_default(value)}\n")
        out.append(f"{indent}{key}{mark}:\n")
        for number, variant in enumerate(variants):
            comment = _comment(variant, described, is_silent=number == 0 and is_above)
            out.append(f"{indent} | {self._variant(variant, indent, depth)}{comment}\n")
        out.append(f"{indent},\n")
        return out


def _nullable(schema: Any, text: str) -> str:
    is_nullable = isinstance(schema, Mapping) and schema.get("nullable") is True
    return f"{text} | null" if is_nullable and "null" not in text else text


def _comment(variant: Any, described: str | None, *, is_silent: bool) -> str:
    """What stands behind one variant of a property: its description, unless said above, and its default."""
    if not isinstance(variant, Mapping):
        return ""
    own = variant.get("description")
    parts = [own] if isinstance(own, str) and not is_silent and own != described else []
    if "default" in variant:
        parts.append(_default(variant))
    return f" // {' '.join(parts)}" if parts else ""


def _trailing(variant: Any) -> str:
    """Like `_comment` for a oneOf that is no property; here a string default of an enum keeps its quotes, as JSON."""
    if not isinstance(variant, Mapping):
        return ""
    parts = [variant["description"]] if isinstance(variant.get("description"), str) else []
    if "default" in variant:
        value = variant["default"]
        is_plain = isinstance(value, str) and not _is_enum(variant)
        parts.append(f'default: "{value}"' if is_plain else f"default: {_json(value)}")
    return f" // {' '.join(parts)}" if parts else ""


def _default(schema: Mapping[str, Any]) -> str:
    value = schema["default"]
    if not isinstance(value, str):
        return f"default: {_json(value)}"
    return f"default: {value}" if _is_enum(schema) else f'default: "{value}"'


def _is_enum(schema: Mapping[str, Any]) -> bool:
    return isinstance(schema.get("enum"), list) and bool(schema["enum"])


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _EXPONENT.sub(_short_exponent, text) if isinstance(value, float) else text


def _short_exponent(match: re.Match[str]) -> str:
    return f"e{'-' if match.group(1) == '-' else ''}{match.group(2)}"


def _lines(text: str) -> list[str]:
    """Lines as Rust's `str::lines` cuts them: at \\n only, a \\r before it dropped, none after a last \\n."""
    if not text:
        return []
    lines = text.removesuffix("\n").split("\n")
    is_ended = [True] * (len(lines) - 1) + [text.endswith("\n")]
    return [line.removesuffix("\r") if ended else line for line, ended in zip(lines, is_ended, strict=True)]
