"""`meshplan explain-error`, and that every code in the sources has a page and every page a code."""

import ast
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import meshplan
from meshplan.cli.explain_error import codes, page
from meshplan.cli.main import app
from meshplan.errors import PlanError

ROOT = Path(meshplan.__file__).parents[1]
SOURCES = [path for room in ("meshplan", "kernels") for path in (ROOT / room).rglob("*.py") if "docs" not in path.parts]


def codes_in(tree: ast.AST) -> set[str]:
    """Codes that a source gives to PlanErrors, and to the verdicts that become PlanErrors: `code="x"` and `{"code": "x"}`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            pairs = [(k.arg, k.value) for k in node.keywords]
        elif isinstance(node, ast.Dict):
            pairs = [(k.value, v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)]
        elif isinstance(node, ast.FunctionDef):
            arguments = node.args.kwonlyargs
            pairs = [(a.arg, d) for a, d in zip(arguments, node.args.kw_defaults, strict=True) if d is not None]
        else:
            continue
        found |= {value.value for name, value in pairs if name == "code" and isinstance(value, ast.Constant)}
    return {code for code in found if isinstance(code, str)}


def test_every_code_has_a_page_and_every_page_a_code():
    used = set().union(*(codes_in(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES))
    assert sorted(used - set(codes())) == [], "codes without a page in docs/errors"
    assert sorted(set(codes()) - used) == [], "pages of codes that no source raises"


@pytest.mark.parametrize("code", codes())
def test_a_page_says_what_it_means_shows_an_example_and_a_cure(code):
    lines = page(code).splitlines()
    assert lines[0] == f"# {code}" and lines[1] == "" and len(lines[2]) > 20
    example, cure = lines.index("## Example"), lines.index("## Cure")
    assert any(line.startswith("    ") for line in lines[example:cure])
    assert any(line and not line.startswith("#") for line in lines[cure:])


def run(*args):
    return CliRunner().invoke(app, ["explain-error", *args])


def test_the_command_prints_the_page():
    result = run("two-rules")
    assert result.exit_code == 0 and result.stdout == page("two-rules")
    assert "`override: true`" in result.stdout


def test_a_code_may_be_pasted_with_its_brackets():
    assert run("[two-rules]").stdout == page("two-rules")


def test_without_a_code_all_are_listed():
    assert run().stdout.split() == codes()


def test_json_has_the_code_and_the_page():
    assert json.loads(run("two-rules", "--json").stdout) == {"code": "two-rules", "page": page("two-rules")}


def test_an_unknown_code_names_the_nearest():
    result = run("two-rule")
    assert result.exit_code == 2 and "two-rules" in result.stderr
    with pytest.raises(PlanError) as caught:
        page("nothing-like-it-at-all")
    assert caught.value.code == "no-such-code"
