"""Writes what the chart takes from the pydantic models: `values.schema.json`, and the list of the config tree's keys for its templates.

`python -m tools.chart.schema` after a change of `common/config.py` or `tools/chart/values.py`; a test holds the files equal.
"""

from __future__ import annotations

import json
from pathlib import Path

from common.config import Config
from tools.chart.values import CONFIG_KEYS, ChartValues

CHART = Path(__file__).resolve().parents[2] / "helm" / "tandem"


def values_schema() -> dict:
    """One JSON schema for both halves; keys that neither has are refused at every level."""
    config = Config.model_json_schema()
    chart = ChartValues.model_json_schema(by_alias=True)
    shared = config["properties"].keys() & chart["properties"].keys()
    if shared:
        raise ValueError(f"the chart can't have keys of its own that the config tree has: {sorted(shared)}")
    return _without_titles(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "additionalProperties": False,
            "required": [*config["required"], *chart["required"]],
            "properties": config["properties"] | chart["properties"] | {"global": {"type": "object"}},
            "$defs": _apart(config["$defs"], chart["$defs"]),
        }
    )


def config_keys_template() -> str:
    return '{{- define "tandem.configKeys" -}}\n' + json.dumps(CONFIG_KEYS) + "\n{{- end -}}\n"


def files() -> dict[Path, str]:
    """What must stand in the chart, by path."""
    return {
        CHART / "values.schema.json": json.dumps(values_schema(), indent=1, ensure_ascii=False) + "\n",
        CHART / "templates" / "_config-keys.tpl": config_keys_template(),
    }


def main() -> None:
    for path, text in files().items():
        path.write_text(text)


def _apart(first: dict, second: dict) -> dict:
    same = first.keys() & second.keys()
    if same:
        raise ValueError(f"two models of the same name: {sorted(same)}; rename the chart's")
    return first | second


def _without_titles(node):
    """pydantic titles each key with its own name; `title` as a property's name stays."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: _without_titles(value) for key, value in node.items() if not (key == "title" and isinstance(value, str))}


if __name__ == "__main__":
    main()
