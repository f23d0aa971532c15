"""A folder of safetensors files: what each tensor is and where, and rectangular pieces of it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshplan.errors import PlanError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".pkl")

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
"""torch's dtype by the name in a file's header; a tensor of any other one is refused."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, not read yet."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafeTensors:
    """The weights in `path`: a `.safetensors` file, or a folder with `model.safetensors` or its index and shards.

    Attributes:
        tensors: what is there, by the names in the files.
        bytes_read: bytes of tensors that were read so far.

    Raises PlanError: `no-checkpoint`; `unsafe-checkpoint` where there are only pickles, which are never opened;
    `damaged-checkpoint` for files that cannot be read, contradict their index, or lie outside of the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.bytes_read = 0
        self._open: dict[Path, Any] = {}
        files, listed = _files_of(self.path)
        self.tensors: dict[str, Stored] = {}
        for file in files:
            for name in self._file(file).keys():  # noqa: SIM118  its handle is no dict
                if name in self.tensors:
                    raise _damaged(self.path, f"{name} is in {self.tensors[name].file.name} and in {file.name}")
                self.tensors[name] = self._stored(file, name)
        for name, file in listed.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise _damaged(self.path, f"{INDEX} says that {name} is in {file.name}, and it is not")

    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """The piece of tensor `name` of extent `size` at `offset`, a new tensor of the stored dtype on the CPU."""
        stored = self.tensors[name]
        if math.prod(size) == 0:
            return torch.empty(tuple(size), dtype=stored.dtype)
        try:
            handle = self._file(stored.file)
            if not stored.shape:
                piece = handle.get_tensor(name)
            else:
                piece = handle.get_slice(name)[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        except _errors() as error:
            raise _damaged(stored.file, str(error)) from error
        self.bytes_read += piece.numel() * piece.element_size()
        return piece

    def digest(self) -> str:
        """A hash of the names, shapes and dtypes, for ranks to compare."""
        table = sorted((name, list(s.shape), str(s.dtype)) for name, s in self.tensors.items())
        return hashlib.sha256(json.dumps(table).encode()).hexdigest()

    def _file(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = _safetensors().safe_open(file, framework="pt")
            except _errors() as error:
                raise _damaged(file, str(error)) from error
        return self._open[file]

    def _stored(self, file: Path, name: str) -> Stored:
        piece = self._file(file).get_slice(name)
        dtype = DTYPES.get(piece.get_dtype())
        if dtype is None:
            raise PlanError(
                f"{name} in {file} has the dtype {piece.get_dtype()}",
                code="dtype-mismatch",
                legal=", ".join(DTYPES),
            )
        return Stored(file, tuple(piece.get_shape()), dtype)


def _files_of(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files to read, and what an index says of them."""
    if path.is_file() and path.suffix == ".safetensors":
        return [path], {}
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS], {}
    if (path / INDEX).is_file():
        return _indexed(path)
    names = [path.name] if path.is_file() else sorted(f.name for f in path.iterdir()) if path.is_dir() else []
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        raise PlanError(
            f"{path} holds its weights as {pickles[0]}: a pickle can run code while it is read, and is read whole",
            code="unsafe-checkpoint",
            legal="safetensors: load those you trust with transformers once, and save_pretrained to another folder",
        )
    raise PlanError(
        f"{path} holds no weights: there is no {WEIGHTS} and no {INDEX} in it",
        code="no-checkpoint",
        legal="a local folder as save_pretrained writes it; nothing is downloaded",
    )


def _indexed(path: Path) -> tuple[list[Path], dict[str, Path]]:
    try:
        table = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
        listed = {str(name): str(file) for name, file in table.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(path / INDEX, f"{type(error).__name__}: {error}") from error
    for file in listed.values():
        if Path(file).name != file or not (path / file).is_file():
            raise _damaged(path / INDEX, f"it names {file!r}, and no file of this folder is called that")
    return sorted({path / file for file in listed.values()}), {name: path / file for name, file in listed.items()}


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError:
        raise PlanError(
            "reading and writing weights needs the safetensors package",
            code="bad-model",
            legal="pip install safetensors",
        ) from None
    return safetensors


def _errors() -> tuple[type[BaseException], ...]:
    return (_safetensors().SafetensorError, OSError)


def _damaged(file: Path, why: str) -> PlanError:
    return PlanError(f"{file} cannot be read: {why}", code="damaged-checkpoint", legal="all files as they were saved")
