"""What a folder of weights must be to be read, and that a piece costs its own bytes."""

import json

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.pretrained.files import INDEX, WEIGHTS, SafeTensors

save_file = pytest.importorskip("safetensors.torch").save_file

X = torch.arange(35.0).reshape(5, 7)


def test_a_piece_is_read_alone_and_counted(tmp_path):
    save_file({"x": X, "s": torch.tensor(3), "e": torch.empty(0, 4)}, tmp_path / WEIGHTS)
    files = SafeTensors(tmp_path)
    assert files.tensors["x"].shape == (5, 7) and files.tensors["s"].dtype == torch.int64
    assert torch.equal(files.read("x", (1, 2), (3, 4)), X[1:4, 2:6])
    assert files.bytes_read == 3 * 4 * 4
    assert files.read("s", (), ()).item() == 3
    assert files.read("e", (0, 0), (0, 4)).shape == (0, 4) and files.read("x", (5, 0), (0, 7)).shape == (0, 7)
    assert files.bytes_read == 3 * 4 * 4 + 8


def test_one_file_is_a_folder_of_one(tmp_path):
    save_file({"x": X}, tmp_path / "other.safetensors")
    assert torch.equal(SafeTensors(tmp_path / "other.safetensors").read("x", (0, 0), (5, 7)), X)


def _index(folder, table):
    (folder / INDEX).write_text(json.dumps({"weight_map": table}))


def _outside(folder):
    save_file({"x": X}, folder.parent / "x.safetensors")
    _index(folder, {"x": "../x.safetensors"})


def _not_in_it(folder):
    save_file({"x": X}, folder / "a.safetensors")
    _index(folder, {"x": "a.safetensors", "y": "a.safetensors"})


def _twice(folder):
    save_file({"x": X}, folder / "a.safetensors")
    save_file({"x": X, "y": X + 1}, folder / "b.safetensors")
    _index(folder, {"x": "a.safetensors", "y": "b.safetensors"})


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda f: None, "no-checkpoint", "nothing is downloaded"),
        (lambda f: (f / "pytorch_model.bin").write_bytes(b"x"), "unsafe-checkpoint", "pytorch_model.bin"),
        (lambda f: (f / "pytorch_model.bin.index.json").write_text("{}"), "unsafe-checkpoint", "save_pretrained"),
        (lambda f: (f / WEIGHTS).write_bytes(b"not a header"), "damaged-checkpoint", WEIGHTS),
        (lambda f: (f / INDEX).write_text("[]"), "damaged-checkpoint", INDEX),
        (_outside, "damaged-checkpoint", "../x.safetensors"),
        (_not_in_it, "damaged-checkpoint", "y is in a.safetensors"),
        (_twice, "damaged-checkpoint", "x is in a.safetensors and in b.safetensors"),
    ],
)
def test_what_is_no_safe_checkpoint_is_refused(tmp_path, make, code, words):
    folder = tmp_path / "folder"
    folder.mkdir()
    make(folder)
    with pytest.raises(PlanError) as refused:
        SafeTensors(folder)
    assert refused.value.code == code and words in str(refused.value)


def test_a_cut_off_file_is_damaged(tmp_path):
    save_file({"x": X}, tmp_path / WEIGHTS)
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[:-8])
    with pytest.raises(PlanError) as refused:
        SafeTensors(tmp_path)
    assert refused.value.code == "damaged-checkpoint"
