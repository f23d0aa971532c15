"""Plan files: a safe subset of YAML 1.2 (no code, no tags, bounded aliases), read with line numbers and written."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent, DocumentStartEvent, NodeEvent, ScalarEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from meshplan.errors import PlanError, Where
from meshplan.plan.patterns import nearest
from meshplan.plan.plan import Plan
from meshplan.plan.source import Mark, Source
from meshplan.plan.source import Path as KeyPath

MAX_NODES = 100_000
"""Values a plan may have once its aliases are written out: it stops a file of a few lines that unfolds to billions."""
MAX_DEPTH = 32
MAX_LENGTH = 4 << 20
SHOWN = 300
"""Longest source line an error quotes."""


def load_plan(path_or_name: str | Path) -> Plan:
    """A plan from a file, or a plan that is shipped with meshplan by its name, `"llama3/tp_sp_fsdp"`.

    A file that exists comes first. Raises PlanError: `no-such-plan` with the nearest shipped names, `yaml-syntax`,
    `yaml-tag`, `yaml-limit`, `duplicate-key`, and all that `Plan.from_dict` raises, each as `plan.yaml:5:9: message`.
    """
    path = Path(path_or_name)
    if path.is_file():
        return parse_plan(path.read_bytes(), str(path_or_name))
    shipped = _shipped()
    name = path.as_posix().removeprefix("./").removeprefix("plans/")
    for suffix in (".yaml", ".yml"):
        name = name.removesuffix(suffix)
    if name in shipped:
        return parse_plan(shipped[name].read_bytes(), str(shipped[name]))
    near = nearest(name, shipped)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise PlanError(
        f"{str(path_or_name)!r} is neither a file nor a shipped plan{hint}",
        code="no-such-plan",
        legal=sorted(shipped) or "a path to a .yaml file",
    )


def shipped_plans() -> list[str]:
    """The names of the plans that come with meshplan, sorted."""
    return sorted(_shipped())


def parse_plan(text: str | bytes, file: str = "<string>") -> Plan:
    """A plan from the text of a plan file (bytes are UTF-8); `file` is the name errors carry. Raises as `load_plan`."""
    reader = _Reader(_decode(text, file) if isinstance(text, bytes) else text, file)
    value = reader.read()
    return Plan.from_dict(value, Source(Where(file), reader.marks))


def dump_plan(plan: Plan) -> str:
    """The text of a plan file that `parse_plan` reads back as an equal plan: one line a rule, input and section. Notes
    of the plan and of its rules are comments."""
    data = plan.to_dict()
    top = CommentedMap()
    for key, value in data.items():
        if key == "rules":
            top[key] = CommentedSeq([_flow(rule) for rule in value])
            for i, rule in enumerate(plan.rules):
                if rule.note:
                    top[key].yaml_set_comment_before_after_key(i, before=rule.note, indent=2)
        elif key == "inputs":
            top[key] = CommentedMap((_text(name), _flow(item)) for name, item in value.items())
        else:
            top[key] = _flow(value)
    yaml = YAML(typ="rt", pure=True)
    yaml.width = 1 << 20
    yaml.indent(mapping=2, sequence=4, offset=2)
    if plan.note:
        top.yaml_set_start_comment(plan.note)
    out = io.StringIO()
    yaml.dump(top, out)
    return out.getvalue()


def _decode(data: bytes, file: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PlanError("the file is not UTF-8 text", code="yaml-syntax", where=Where(file, line)) from None


def _flow(value: Any) -> Any:
    """`value` with every collection marked to be written inline."""
    out: CommentedMap | CommentedSeq
    if isinstance(value, dict):
        out = CommentedMap((_text(key), _flow(item)) for key, item in value.items())
    elif isinstance(value, list):
        out = CommentedSeq([_flow(item) for item in value])
    else:
        return _text(value) if isinstance(value, str) else value
    out.fa.set_flow_style()
    return out


_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.*()/-]*")


def _text(value: str) -> str:
    """`value`, quoted unless it is a simple word: ruamel leaves `?0` and `:0` bare inside `{}`, then cannot read it."""
    return value if _PLAIN.fullmatch(value) else DoubleQuotedScalarString(value)


def _shipped() -> dict[str, Any]:
    """Shipped plan files by name: the package's data, or the repository's folder where meshplan is run from it."""
    root: Any = resources.files("meshplan") / "plans"
    if not root.is_dir():
        root = Path(__file__).parents[2] / "plans"
    if not root.is_dir():
        return {}
    return dict(_yaml_files(root, ""))


def _yaml_files(folder: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from _yaml_files(item, f"{prefix}{item.name}/")
        elif item.name.endswith(".yaml"):
            yield prefix + item.name.removesuffix(".yaml"), item


class _Reader:
    """Turns one YAML document into plain values and notes the place of each."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file, self.lines = text, file, re.split(r"\r\n|\r|\n", text)
        self.marks: dict[KeyPath, Mark] = {}
        self.nodes = 0
        self.yaml = YAML(typ="safe", pure=True)
        if len(text) > MAX_LENGTH:
            raise self._error(f"the plan file is larger than {MAX_LENGTH} characters", "yaml-limit", None)

    def read(self) -> Any:
        try:
            # Events first: the composed tree no longer tells an explicit tag from the one a value has anyway.
            depth = 0
            for event in YAML(typ="safe", pure=True).parse(self.text):
                depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
                self._check_event(event, depth)
            root = self.yaml.compose(self.text)
        except MarkedYAMLError as error:
            message = " ".join(part for part in (error.context, error.problem) if part)
            raise self._error(f"not YAML: {message}", "yaml-syntax", error.problem_mark or error.context_mark) from None
        except YAMLError as error:
            raise self._error(f"not YAML: {str(error).splitlines()[0]}", "yaml-syntax", None) from None
        if root is None:
            raise self._error("the plan file is empty", "missing-key", None, legal="mesh: {tp: 2}")
        return self._value(root, ())

    def _check_event(self, event: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._error(f"the plan is nested deeper than {MAX_DEPTH}", "yaml-limit", event.start_mark)
        if isinstance(event, DocumentStartEvent) and event.version not in (None, (1, 2)):
            raise self._error("a plan is YAML 1.2", "yaml-syntax", event.start_mark, legal="no %YAML directive")
        tag = getattr(event, "tag", None)
        if isinstance(event, NodeEvent) and tag is not None:
            raise self._error(f"tag {tag} in a plan", "yaml-tag", event.start_mark, legal="plain values")
        if isinstance(event, ScalarEvent) and len(event.value) > 10_000:
            raise self._error("a value of more than 10000 characters", "yaml-limit", event.start_mark)

    def _value(self, node: Node, path: KeyPath) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise self._error(f"the plan has more than {MAX_NODES} values", "yaml-limit", node.start_mark)
        if len(path) > MAX_DEPTH:  # which only an alias inside its own anchor still reaches
            raise self._error(f"the plan is nested deeper than {MAX_DEPTH}", "yaml-limit", node.start_mark)
        if isinstance(node, MappingNode):
            out: dict[Any, Any] = {}
            for key_node, value_node in node.value:
                key = self._key(key_node)
                if key in out:
                    raise self._error(f"the key {key!r} is here twice", "duplicate-key", key_node.start_mark)
                at = (*path, key)
                self.marks[at] = Mark(self._where(key_node.start_mark), self._where(value_node.start_mark))
                out[key] = self._value(value_node, at)
            return out
        if isinstance(node, SequenceNode):
            items = []
            for i, item in enumerate(node.value):
                where = self._where(item.start_mark)
                at = (*path, i)
                self.marks[at] = Mark(where, where)
                items.append(self._value(item, at))
            return items
        return self._scalar(node)

    def _key(self, node: Node) -> str:
        key = self._scalar(node) if isinstance(node, ScalarNode) else None
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise self._error(
                f"{getattr(node, 'value', None)!r} cannot be a key",
                "bad-value",
                node.start_mark,
                legal="a name or an index",
            )
        # An output's index may be written as a number; keys are names everywhere else.
        return str(key)

    def _scalar(self, node: Node) -> Any:
        kind = str(node.tag).rpartition(":")[2]
        construct = {"int": "construct_yaml_int", "float": "construct_yaml_float", "bool": "construct_yaml_bool"}
        if kind == "null":
            return None
        if kind in construct:
            return getattr(self.yaml.constructor, construct[kind])(node)
        return node.value

    def _where(self, mark: Any) -> Where:
        if mark is None:
            return Where(self.file)
        text = self.lines[mark.line] if mark.line < len(self.lines) else None
        if text is not None and len(text) > SHOWN:
            text = None
        return Where(self.file, mark.line + 1, mark.column + 1, text)

    def _error(self, message: str, code: str, mark: Any, legal: str | None = None) -> PlanError:
        return PlanError(message, code=code, where=self._where(mark), legal=legal)
