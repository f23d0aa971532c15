"""What is installed: one top-level package, with kernels and plans inside it, from a wheel and in editable form."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import meshplan.kernels
import meshplan.plans
from meshplan.plan.yaml_io import shipped_plans

ROOT = Path(__file__).parents[1]
FOLDERS = ("meshplan", "kernels", "plans", "docs")


def _python(code: str, cwd: Path) -> str:
    """What the program `code` prints in another process; as always with -c, `cwd` is the first place to import from."""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of these sources, built without an index from a copy, so that nothing is left in the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    built = subprocess.run([*pip, "wheel", *options, "."], cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder that the wheel was installed into."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    return target


def test_a_wheel_has_one_top_level_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"meshplan"}


def test_a_wheel_holds_every_source_and_every_plan(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    # The packages are listed one by one in pyproject.toml, so a new folder can be forgotten there.
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "meshplan").rglob("*.py")}
    for folder in FOLDERS[1:]:
        expected |= {f"meshplan/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    plans = {f"meshplan/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "plans").rglob("*.yaml")}
    pages = {f"meshplan/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "docs").rglob("*.md")}
    assert expected | plans | pages <= names and pages
    assert len(plans) >= 16


def test_a_wheel_carries_the_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_an_installed_wheel_finds_its_plans_from_any_folder(installed, tmp_path):
    code = f"""
import sys; sys.path.insert(0, {str(installed)!r})
import json, meshplan, meshplan.kernels
from meshplan.plan.yaml_io import shipped_plans
plan = meshplan.load_plan("llama3/tp_sp_fsdp")
print(json.dumps([meshplan.__file__, meshplan.kernels.__file__, shipped_plans(), plan.to_dict()]))
"""
    package, kernels, names, plan = json.loads(_python(code, tmp_path))
    assert Path(package) == installed / "meshplan" / "__init__.py"
    assert Path(kernels) == installed / "meshplan" / "kernels" / "__init__.py"
    shipped = (ROOT / "plans").glob("*/*.yaml")
    assert names == sorted(path.relative_to(ROOT / "plans").with_suffix("").as_posix() for path in shipped)
    assert plan["mesh"] == {"dp_shard": -1, "tp": 4}
    assert plan["fsdp"]["units"] == ["layers.*"]


def test_an_editable_install_finds_kernels_and_plans_at_the_top_of_the_repository(tmp_path):
    assert Path(meshplan.kernels.__file__) == ROOT / "kernels" / "__init__.py"
    assert Path(meshplan.plans.__file__) == ROOT / "plans" / "__init__.py"
    assert "llama3/tp_sp_fsdp" in shipped_plans()
    code = "import meshplan; print(meshplan.load_plan('gpt/tp').mesh['tp'], meshplan.kernels.__name__)"
    assert _python("import meshplan.kernels; " + code, tmp_path).split() == ["-1", "meshplan.kernels"]


def test_no_distribution_claims_top_level_names_of_ours():
    owners = importlib.metadata.packages_distributions()
    assert "meshplan" in owners["meshplan"]
    assert "meshplan" not in owners.get("kernels", []) + owners.get("plans", [])


def test_transformers_does_not_take_the_repository_for_the_kernels_package():
    # Started in the repository's root, whose folder `kernels` is then importable under that name.
    code = """
import meshplan
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=5)
model = LlamaForCausalLM(LlamaConfig(**sizes))
print(is_kernels_available(), sum(p.numel() for p in model.parameters()))
"""
    # Embedding and head 2 x 5 x 8, four projections of attention 4 x 8 x 8, three of the MLP, three norms of 8.
    available, parameters = _python(code, ROOT).split()
    assert int(parameters) == 2 * 40 + 4 * 64 + 3 * 64 + 3 * 8
    assert available == str("kernels" in importlib.metadata.packages_distributions())
