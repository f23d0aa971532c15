"""docs/transformers.md tells the truth: its scripts are run in order, and leave what the page says."""

import re

import pytest
import torch

from tests.readme import ROOT, blocks, run, write_files

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TEXT = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
BLOCKS = blocks(TEXT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the page's files, and the tiny model."""
    made = tmp_path_factory.mktemp("transformers")
    files = {file.name for file in write_files(TEXT, made)}
    commands = {block.commands[0].split()[-1] for block in BLOCKS if block.language == "bash"}
    assert files == commands, "every script is run, and every command has its script"
    run("python tiny.py", made)
    return made


def _command(script):
    return next(b.commands[0] for b in BLOCKS if b.language == "bash" and b.commands[0].endswith(script))


def test_finetuning_lowers_the_loss_and_leaves_a_folder_for_transformers(folder):
    printed = re.fullmatch(r"loss (\d\.\d)\n", run(_command("finetune.py"), folder))
    assert printed and float(printed[1]) < 5.0  # 5.5 nats at first: 256 tokens alike
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(folder / name) for name in ("tiny", "tuned"))
    moved = [n for n, t in before.state_dict().items() if not torch.equal(t, after.state_dict()[n])]
    assert set(moved) == set(dict(before.named_parameters()))


def test_the_adapters_are_saved_for_peft(folder):
    run(_command("lora.py"), folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny")
    assert peft.PeftModel.from_pretrained(base, folder / "adapter").peft_config["default"].r == 4


def test_the_sample_is_that_of_one_device(folder):
    run(_command("sample.py"), folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny")
    ids = torch.tensor([[1, 17, 99, 4]])
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, use_cache=False)
    for rank in range(2):
        assert torch.equal(torch.load(folder / f"sample{rank}.pt"), want)
