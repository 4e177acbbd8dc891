"""Write the reference part of docs/configuration.md from the configuration's own JSON Schema.

python tools/config_reference.py           rewrite the file
python tools/config_reference.py --check   exit 1 if it is not up to date
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
MARK = "<!-- From here on: made by tools/config_reference.py. -->\n"
SECTIONS = [
    ("The file", "RunSpec"),
    ("model", "NNModelParams"),
    ("model.net", "NNParams"),
    ("model.loss", "LossParams"),
    ("model.metrics", "MetricParams"),
    ("data", "NNDataParams"),
    ("data.train, data.val, data.test", "dataset"),
    ("train", "NNTrainParams"),
    ("train.optim", "NNOptimParams"),
    ("train.optim.param_groups", "NNParamGroupSpec"),
    ("train.scheduler", "NNSchedulerParams"),
    ("train.monitor", "MonitorSpec"),
    ("trainer", "NNTrainerParams"),
    ("hooks", "hook"),
    ("hooks.schedule", "ProfileSchedule"),
    ("checkpoint", "CheckpointParams"),
    ("history", "HistoryJournal"),
    ("callbacks", "CallbackParams"),
]
_WORDS = {"string": "text", "boolean": "true, false", "integer": "integer", "number": "number", "array": "list"}
PYTHON_ONLY = {"ArrayDataset", "ModulePatchHook"}  # rows, modules: they cannot be written in a file


def render() -> str:
    """The reference: one table of fields a section, one a kind."""
    import nnx_jax.data  # noqa: F401  # registers the datasets
    from nnx_jax.hooks import register_builtin
    from nnx_jax.params.schema import json_schema

    register_builtin()
    schema = json_schema()
    known = {**schema["$defs"], "RunSpec": schema}
    known["dataset"] = known["NNDataParams"]["properties"]["train"]
    known["hook"] = schema["properties"]["hooks"]["items"]
    return "\n".join(_section(title, known[name], known) for title, name in SECTIONS)


def _section(title: str, found: dict[str, Any], known: dict[str, Any]) -> str:
    offered = [entry for part in found.get("anyOf", []) for entry in part.get("oneOf", [])]
    if not offered:
        return f"## {title}\n\n{_summary(found)}\n\n{_table(found)}"
    text = f"## {title}\n\nOne of these, picked by `kind`.\n"
    for name in sorted({_target(entry) for entry in offered} - PYTHON_ONLY):
        kind = known[name]["properties"]["kind"]["const"]
        fields = _table(known[name])
        text += f"\n### {title.split(',')[0]}: {kind}\n\n{_summary(known[name])}\n" + (f"\n{fields}" if fields else "")
    return text


def _target(entry: dict[str, Any]) -> str:
    return str(entry["$ref"]).rpartition("/")[2]


def _summary(found: dict[str, Any]) -> str:
    return str(found.get("description", "")).split("\n\n")[0].replace("\n", " ")


def _attributes(found: dict[str, Any]) -> dict[str, str]:
    """Field descriptions from the part "Attributes:" of a class's text, for classes that keep them there."""
    part = str(found.get("description", "")).partition("Attributes:\n")[2].split("\n\n")[0]
    entries = re.findall(r"^ +(\w+): (.*(?:\n {8,}.*)*)", part, re.MULTILINE)
    return {name: text[0].upper() + " ".join(text.split())[1:] for name, text in entries}


def _table(found: dict[str, Any]) -> str:
    rows, elsewhere = [], _attributes(found)
    for name, field in found["properties"].items():
        if name == "kind" and "const" in field:
            continue
        default = "" if name in found.get("required", ()) else _default(field)
        about = str(field.get("description", elsewhere.get(name, ""))).replace("\n", " ").replace("|", "\\|")
        rows.append(f"| `{name}` | {_type(field)} | {default} | {about} |\n")
    return "| field | value | default | meaning |\n|---|---|---|---|\n" + "".join(rows) if rows else ""


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    if "default" not in field or isinstance(value, dict):
        return ""
    return "none" if value is None else f"`{json.dumps(value)}`".replace('"', "")


def _type(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "$ref" in field or "oneOf" in field:
        return "mapping"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(part) for part in field["anyOf"] if part.get("type") != "null"))
    kind = {"string": "text", "boolean": "true, false", "integer": "integer", "number": "number"}.get(
        field.get("type", "")
    )
    if kind is None:
        return "list" if field.get("type") == "array" else "mapping"
    return kind + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    text = f" >= {low:g}" if low is not None and low > -(2**16) else ""
    if (above := field.get("exclusiveMinimum")) is not None:
        text = f" > {above:g}"
    if high is not None and high < 2**16:
        text += f", <= {high:g}"
    if (below := field.get("exclusiveMaximum")) is not None:
        text += f", < {below:g}"
    return text


def page() -> str:
    """The whole page: what was written by hand, then the reference."""
    head, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise SystemExit(f"{PAGE} has no line {MARK!r}")
    return f"{head}{MARK}\n{render()}"


def main() -> int:
    """Write the page, or check it."""
    text = page()
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
