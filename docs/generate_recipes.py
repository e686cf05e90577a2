"""Write docs/recipes.md from the settings classes: their fields, limits, defaults and docstrings.

python docs/generate_recipes.py
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter

from oasis_cli.cli.group import oasis
from oasis_cli.pipeline.recipe import Recipe, shipped_recipes

PAGE = Path(__file__).with_name("recipes.md")

INTRODUCTION = """# Recipes

Written by `docs/generate_recipes.py` from the settings classes. To change this page, change their docstrings and run
the script.

A recipe is a YAML file with the settings of all stages. `oasis run` takes the whole of it. With `--recipe`, a single
stage takes its own part: {takers}.

Every key may be left out and then has its default; a key that is not on this page is refused, with its line and the
nearest name that is. What is laid over what, the later winning: default, recipe, `--set` (of `run`), option of the
command. The settings that a calibration or a quantized folder was made with stand in its manifest, under `recipe`.

```yaml
{example}```

Scalars are those of YAML 1.2: `5e-3` is a number, `yes` and `010` are text. `--set` takes the path of a key, and a
value written as in the file: `--set quantize.act_bits=3`, `--set 'eval.ppl=[wikitext2, notes.txt]'`.

Recipes that come with the tool are named without a folder:

{shipped}
"""


def page() -> str:
    """The whole page."""
    schema = TypeAdapter(Recipe).json_schema()
    stages = {name: entry for name, entry in schema["properties"].items() if "$ref" in entry}
    shipped = {name: path.read_text(encoding="utf-8") for name, path in shipped_recipes().items()}
    listed = "\n".join(f"- `{name}`: {_opening_comment(text)}" for name, text in shipped.items())
    takers = ", ".join(f"`{name}`" for name in stages if "recipe" in dict(_options(name)))
    introduction = INTRODUCTION.format(example=shipped["w4a4"], shipped=listed, takers=takers)
    sections = [introduction, _section("The run", "", schema, stages)]
    for name, entry in stages.items():
        settings = schema["$defs"][entry["$ref"].rpartition("/")[2]]
        sections.append(_section(f"`{name}`", name, settings, {}))
    return "\n".join(sections)


def _opening_comment(text: str) -> str:
    """A shipped recipe's first sentences: the comment that it opens with, without how to call it."""
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    return lines[0]


def _section(title: str, stage: str, schema: Mapping[str, Any], leave_out: Mapping[str, Any]) -> str:
    summary, meanings = _read_docstring(schema["description"])
    options = dict(_options(stage or "run"))
    rows = [
        f"| `{key}` | {_type(entry)} | {_default(entry)} | {meanings[key]} | {options.get(key, '')} |"
        for key, entry in schema["properties"].items()
        if key not in leave_out
    ]
    head = ["| key | type | default | meaning | option |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([f"## {title}", "", summary, "", *head, *rows, ""])


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """First line, and the meaning of every attribute."""
    summary, _, attributes = inspect.cleandoc(text).partition("\nAttributes:\n")
    meanings: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", attributes):
        names, _, meaning = " ".join(entry.split()).partition(": ")
        meanings |= dict.fromkeys(names.split(", "), meaning.rstrip(".").replace("None", "`null`"))
    return summary.splitlines()[0], meanings


def _type(entry: Mapping[str, Any]) -> str:
    if "anyOf" in entry:
        return " or ".join(_type(member) for member in entry["anyOf"])
    if "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry["enum"])
    kind = {"string": "text", "integer": "integer", "number": "number", "boolean": "`true`, `false`", "null": "`null`"}
    if "$ref" in entry:
        return "mapping"
    if entry["type"] == "array":
        return f"list of {_type(entry['items'])}s"
    low, high = entry.get("minimum"), entry.get("maximum")
    limits = f" {low} to {high}" if high is not None else f", at least {low}" if low is not None else ""
    return kind[entry["type"]] + limits


def _default(entry: Mapping[str, Any]) -> str:
    if "default" not in entry:
        return "none: it must be given"
    default = entry["default"]
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _options(command_name: str) -> Iterator[tuple[str, str]]:
    """The option that lays itself over each key, where the stage's command has one."""
    command = oasis.get_command(click.Context(oasis), command_name)
    for parameter in command.params if command else ():
        if isinstance(parameter, click.Option) and parameter.name:
            yield parameter.name, f"`{parameter.opts[-1]}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
