"""README.md tells the truth: every command and snippet is run, and every quoted output is what is printed."""

import re

import pytest
import torch

import meshplan as mp
from meshplan.models.llama import llama_tiny
from tests.readme import README, ROOT, blocks, comparable, is_make, run, write_files

TEXT = README.read_text(encoding="utf-8")
BLOCKS = blocks(TEXT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the page shows."""
    made = tmp_path_factory.mktemp("readme")
    assert {file.name for file in write_files(TEXT, made)} == {"plan.yaml", "typo.yaml", "train.py"}
    return made


def _title(block):
    return block.commands[0]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.output], ids=_title)
def test_a_quoted_output_is_what_the_command_prints(block, folder):
    assert len(block.commands) == 1
    assert comparable(run(block.commands[0], folder)) == comparable(block.output.body)


def test_the_training_script_runs_on_four_ranks_and_leaves_a_checkpoint(folder):
    (command,) = _commands("torchrun")
    printed = re.fullmatch(r"loss (\d\.\d)\n", run(command, folder))
    assert printed, "one line, by one rank"
    # Bytes drawn at random cost 5.5 nats; 20 steps bring the tiny model well below.
    assert 2.0 < float(printed[1]) < 4.5
    assert mp.Plan.from_yaml(mp.load_plan_of(folder / "checkpoint")) == mp.load_plan(folder / "plan.yaml")


def _commands(program):
    silent = [b for b in BLOCKS if b.language == "bash" and not b.output and not is_make(b)]
    return [command for block in silent for command in block.commands if command.startswith(f"{program} ")]


def test_a_plan_is_derived_from_the_command_line(folder):
    (command,) = _commands("meshplan plan")
    assert "gap" in run(command, folder)
    derived = mp.load_plan(folder / "derived.yaml")
    low = mp.lower(llama_tiny(), derived, world_size=4)
    matrices = [p for p in low.placements if len(p["shape"]) > 1]
    assert matrices and all(p["layout"].get("tp", "R").startswith("S") for p in matrices)
    known = {"torchrun", "meshplan"}
    silent = [b for b in BLOCKS if b.language == "bash" and not b.output and not is_make(b)]
    assert {command.split()[0] for block in silent for command in block.commands} <= known
    assert len(_commands("torchrun")) + len(_commands("meshplan")) == 2  # what no test here runs would be found


def test_the_python_snippets_run_as_they_stand(capsys):
    names: dict = {}
    for block in BLOCKS:
        if block.language == "python" and not block.name:
            exec(compile(block.body, "README.md", "exec"), names)
    assert names["plan"].fsdp.units == ("layers.*",) and names["plan"].rules
    assert "dp_replicate 2 x tp 2" in capsys.readouterr().out
    # In each of 2 layers attention and feed-forward reduce their output forward and their input's gradient backward:
    # float32 [8 / 2, 64, 64] each. A rank of two sends the bytes of what it reduces once.
    activations = 2 * 2 * 2 * (4 * 64 * 64) * 4
    # Then gradients over dp_replicate: of q, o (64 x 64), k, v (32 x 64) and the feed-forward (3 of 176 x 64) the half
    # that tp leaves, of embedding and head (256 x 64) and five norms everything; and one int64, the number of tokens.
    gradients = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 176 * 64) // 2 + 2 * 256 * 64 + 5 * 64
    assert names["sent"] == activations + 4 * gradients + 8


def test_every_make_target_on_the_page_exists():
    named = set(re.findall(r"`?make (\w+)", TEXT))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_no_block_goes_untested():
    tested = {"bash", "python", "yaml"}
    assert {b.language for b in BLOCKS if b.name != "layout"} == tested


def test_the_layout_names_folders_that_exist_and_leaves_none_out():
    (layout,) = [b for b in BLOCKS if b.name == "layout"]
    named = {line.split()[0] for line in layout.body.splitlines()}
    assert all((ROOT / name).is_dir() for name in named)
    rooms = {f"meshplan/{p.parent.name}" for p in ROOT.glob("meshplan/*/__init__.py")}
    empty = {room for room in rooms if len(list((ROOT / room).glob("*.py"))) == 1}
    assert rooms - empty <= named


@pytest.mark.parametrize(
    "section",
    [
        {"mesh": {"pp": 2}},
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 2}},
    ],
    ids=lambda section: "+".join(section),
)
def test_what_is_not_there_yet_is_refused_with_the_code_on_the_page(section):
    tokens = mp.Input(shape=(4, 8), dtype=torch.int64, place={"dp": mp.S(0)})
    plan = mp.Plan.from_dict({"inputs": {"tokens": tokens, "labels": tokens}, **section})
    with pytest.raises(mp.PlanError) as refused:
        mp.lower(llama_tiny(), plan, world_size=2)
    assert f"[{refused.value.code}]" in TEXT
    assert refused.value.code == "axis-not-lowered"
