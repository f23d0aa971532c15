"""torch.distributed.checkpoint with our own extents: tensors by box, metadata read without executing anything."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from meshplan.errors import PlanError
from meshplan.runtime.extents import Box

METADATA = ".metadata"

_ADMITTED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "Path"},
}


@dataclass(frozen=True)
class Piece:
    """One tensor of a checkpoint as this rank sees it.

    Attributes:
        local: this rank's part; its memory is read by a save and written by a load.
        shape: shape of the full tensor.
        boxes: where `local` lies in the full tensor.
    """

    local: Tensor
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class _Unpickler(pickle.Unpickler):
    """Admits the classes that DCP's own writer puts in `.metadata`, none of which acts when it is built."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise PlanError(
            f"the checkpoint's {METADATA} asks for {module}.{name}: reading it could run code",
            code="unsafe-checkpoint",
            legal="metadata written by torch.distributed.checkpoint",
        )


class Reader(dcp.FileSystemReader):
    """DCP's reader whose metadata is unpickled by the class list above; tensors are read with `weights_only`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / METADATA
        try:
            with file.open("rb") as stream:
                metadata = _Unpickler(stream).load()
        except PlanError:
            raise
        except FileNotFoundError:
            raise PlanError(
                f"{self.path} holds no checkpoint: there is no {METADATA} in it", code="no-checkpoint"
            ) from None
        except Exception as e:  # a damaged pickle raises nearly anything
            raise PlanError(f"{file} cannot be read: {e}", code="damaged-checkpoint") from e
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise PlanError(f"{file} does not describe a checkpoint", code="damaged-checkpoint")
        return metadata


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.views: dict[MetadataIndex, Tensor] = {}
        self.items: list[WriteItem] = []
        for key, piece in pieces.items():
            properties = TensorProperties(dtype=piece.local.dtype)
            for box in piece.boxes:
                index = MetadataIndex(key, box.offset)
                chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))
                data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(piece.shape))
                self.items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
                self.views[index] = box.of(piece.local)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self.items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.views[write_item.index].contiguous()


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.views = {
            MetadataIndex(key, box.offset): box.of(piece.local) for key, piece in pieces.items() for box in piece.boxes
        }

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        view = self.views[read_item.dest_index]
        for dim, (first, n) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, first, n)
        return view


def write(folder: Path, pieces: Mapping[str, Piece], distributed: bool) -> None:
    """Write this rank's boxes to `folder`; what several ranks hold is written by one. Collective if `distributed`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            {},
            storage_writer=dcp.FileSystemWriter(folder),
            planner=_SavePlanner(pieces),
            no_dist=not distributed,
        )


def tensors_in(metadata: Metadata) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of each tensor that a checkpoint holds; pickled objects in it are passed over, never read."""
    return {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def check_complete(metadata: Metadata, key: str) -> None:
    """Raise PlanError `damaged-checkpoint` unless the chunks of `key` lie in its shape and fill it exactly once."""
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
    inside = all(
        o >= 0 and o + n <= full for at, size in boxes for o, n, full in zip(at, size, entry.size, strict=True)
    )
    filled = sum(torch.Size(size).numel() for _, size in boxes)
    total = entry.size.numel()
    if not inside or filled != total or len(set(boxes)) != len(boxes):
        raise PlanError(
            f"{key} is {list(entry.size)} but its {len(boxes)} saved chunks hold {filled} of {total} elements",
            code="damaged-checkpoint",
        )


def plan_reads(reader: Reader, metadata: Metadata, pieces: Mapping[str, Piece]) -> LoadPlan:
    """What this rank must read to fill `pieces`, after checking that all of it is there and safe to read.

    Raises PlanError `damaged-checkpoint` for a chunk without storage, a file outside the folder, missing or too short.
    """
    items: list[ReadItem] = []
    sizes: dict[str, int] = {}
    for key, piece in pieces.items():
        check_complete(metadata, key)
        entry = metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        chunks = [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.size)) for b in piece.boxes]
        items += create_read_items_for_chunk_list(key, entry, chunks)
    for item in items:
        info = metadata.storage_data.get(item.storage_index)
        if info is None:
            raise PlanError(f"{item.storage_index.fqn} has a chunk that no file holds", code="damaged-checkpoint")
        name = info.relative_path
        if Path(name).name != name or info.transform_descriptors:
            raise PlanError(f"{item.storage_index.fqn} lies in {name!r}, not a plain file", code="damaged-checkpoint")
        if name not in sizes:
            file = Path(reader.path) / name
            sizes[name] = os.path.getsize(file) if file.is_file() else -1
        if info.offset < 0 or info.length < 0 or info.offset + info.length > sizes[name]:
            raise PlanError(
                f"{item.storage_index.fqn} needs {info.offset + info.length} bytes of {name}, which "
                + (f"has {sizes[name]}" if sizes[name] >= 0 else "is missing"),
                code="damaged-checkpoint",
            )
    return LoadPlan(items)


def read(reader: Reader, metadata: Metadata, plan: LoadPlan, pieces: Mapping[str, Piece]) -> None:
    """Fill `pieces` as planned. No collective. Raises PlanError `damaged-checkpoint` for data that cannot be read."""
    reader.set_up_storage_reader(metadata, False)
    try:
        reader.read_data(plan, _LoadPlanner(pieces)).wait()
    except Exception as e:  # torch.load on damaged bytes raises nearly anything
        raise PlanError(f"{reader.path}: {e}", code="damaged-checkpoint") from e
