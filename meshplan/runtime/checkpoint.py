"""Checkpoints that do not depend on the mesh: saved sharded under the user's names, loaded on any other layout.

A checkpoint is a folder that `torch.distributed.checkpoint` reads too: parameters and persistent buffers under the
plain model's state-dict keys, optimizer state as `optimizer/<field>/<parameter>`, tensors of `extra` as `extra/<path>`;
beside it `meshplan.json` (versions, optimizer options, ties, extra) and `plan.yaml`, the plan it was trained under.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.plan.placements import Shard, parse_placement
from meshplan.runtime import dcp
from meshplan.runtime.dcp import Piece
from meshplan.runtime.extents import Parts, boxes_of, local_part
from meshplan.runtime.restore import Loaded, Restore
from meshplan.runtime.rollcall import agree, world_size
from meshplan.runtime.state import encode, model_tensors, optimizer_state, tied_names, unwrapped

FORMAT = 1
PLAN, SIDECAR = "plan.yaml", "meshplan.json"
SLOW = 1800.0  # seconds that ranks may differ while they read or write data


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    timeout: float = 15.0,
) -> None:
    """Save `model`, and `optimizer` if given, to the folder `path`, replacing a checkpoint that is there.

    Every rank calls it, with the same `path` on a file system that all share; without a process group it saves one
    device. Data goes to a hidden folder beside `path` which takes its place when it is complete and checked, so an
    interrupted save leaves the old checkpoint whole.

    Arguments:
        extra: plain data and plain tensors to keep with it, such as a scheduler's state; those of rank 0 are kept.
        timeout: seconds to wait for ranks that have not come yet.

    Raises PlanError, on every rank and before anything is overwritten: `ranks-missing` when only some ranks save,
    `shard-extent` or `partial-tensor` for tensors whose place in the whole is not certain, `not-a-checkpoint` when
    `path` holds something else, `not-plain-data` for an `extra` that would need code to be read back.
    """
    folder, distributed = Path(path), world_size() > 1
    first = not distributed or dist.get_rank() == 0
    staging = folder.with_name(f".{folder.name}.saving")
    content, error = None, None
    try:
        content = _content(model, optimizer, extra if first else None)
        if first:
            _make_room(folder, staging)
    except PlanError as e:
        error = e
    said = agree(f"save {os.fspath(path)}", content and content.shared, error, timeout=timeout)
    assert content is not None
    shared = _merged([ballot.value for ballot in said])
    error = None
    try:
        dcp.write(staging, content.pieces, distributed)
        if first:
            _finish(folder, staging, shared, content)
    except PlanError as e:
        error = e
    except Exception as e:  # DCP wraps what any rank met; disks fail in many ways
        error = PlanError(f"{folder}: {e}", code="checkpoint-write")
    agree(f"finish saving {os.fspath(path)}", None, error, timeout=SLOW)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    timeout: float = 15.0,
) -> Loaded:
    """Load the checkpoint at `path` in place into `model`, and `optimizer` if given, whatever their layout.

    Every rank calls it; without a process group it loads one device. No code in the checkpoint is executed. All is
    checked and read before the first tensor is written, so a load that fails on any rank changes nothing on any.
    Reading stages this rank's part in host memory once. An optimizer needs no step before: its state is made as saved.
    Options of a parameter group are restored except how it runs (`foreach`, `fused`, `capturable`, `differentiable`).

    Arguments:
        strict: refuse keys that are missing or unexpected; otherwise they are left alone and returned.
        timeout: seconds to wait for ranks that have not come yet.

    Raises PlanError: `missing-key`, `unexpected-key` (with the nearest name), `shape-mismatch`, `dtype-mismatch`,
    `tied-mismatch`, `optimizer-groups`, `damaged-checkpoint`, `unsafe-checkpoint`, `no-checkpoint`, `ranks-missing`.
    """
    folder = _settled(Path(path))
    restore, error, keys = None, None, None
    try:
        restore = Restore.prepare(folder, _sidecar(folder), model, optimizer, _parts(model), strict)
        keys = restore.keys
    except PlanError as e:
        error = e
    said = agree(f"load {os.fspath(path)}", keys, error, timeout=timeout)
    assert restore is not None
    unexpected = restore.unexpected({key for ballot in said for key in ballot.value}, strict)
    error = None
    try:
        restore.read()
    except PlanError as e:
        error = e
    agree(f"apply {os.fspath(path)}", None, error, timeout=SLOW)
    restore.commit()
    plan = folder / PLAN
    return Loaded(restore.extra(), plan.read_text() if plan.is_file() else None, restore.missing, unexpected)


def load_plan_of(path: str | os.PathLike[str]) -> str:
    """The YAML text of the plan that the checkpoint at `path` was saved under; needs no model and no process group.

    Raises PlanError `no-checkpoint`, or `no-plan` for a checkpoint of a model that was not parallelised.
    """
    folder = _settled(Path(path))
    if not (folder / dcp.METADATA).is_file():
        raise PlanError(f"{folder} holds no checkpoint: there is no {dcp.METADATA} in it", code="no-checkpoint")
    if not (folder / PLAN).is_file():
        raise PlanError(f"the checkpoint {folder} carries no plan: its model was not parallelised", code="no-plan")
    return (folder / PLAN).read_text()


@dataclass(frozen=True)
class _Content:
    """What one rank brings to a save: its pieces, what all ranks must know, and what rank 0 writes down."""

    pieces: dict[str, Piece]
    shared: dict[str, Any]
    extra: Any
    plan: str | None


def _content(model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any) -> _Content:
    tensors = model_tensors(model)
    parts = _parts(model)
    live: dict[str, tuple[Tensor, Parts | None]] = {name: (t, parts.get(name)) for name, t in tensors.items()}
    shared: dict[str, Any] = {"tied": tied_names(tensors), "groups": None, "scalars": {}}
    if optimizer is not None:
        state = optimizer_state(optimizer, tensors)
        shared.update(groups=state.groups, scalars=state.scalars)
        for (name, field), tensor in state.tensors.items():
            live[f"optimizer/{field}/{name}"] = tensor, parts.get(name)
    held: dict[str, Tensor] = {}

    def hold(tensor: Tensor) -> dict[str, str]:
        key = f"extra/{len(held)}"
        held[key] = tensor
        return {"$tensor": key}

    encoded = encode(extra, hold)
    live.update({key: (tensor, None) for key, tensor in held.items()})
    pieces = {
        key: Piece(local_part(t), tuple(t.shape), tuple(boxes_of(key, t, part))) for key, (t, part) in live.items()
    }
    shared["table"] = {k: [list(p.shape), str(p.local.dtype)] for k, p in pieces.items() if k not in held}
    plan = getattr(_lowered(model), "plan", None)
    return _Content(pieces, shared, encoded, plan.to_yaml() if plan is not None else None)


def _merged(shares: list[dict[str, Any]]) -> dict[str, Any]:
    """One description from those of all ranks, which differ where pipeline stages hold different modules."""
    table: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    groups: list[dict[str, Any]] | None = None
    ties: set[tuple[str, ...]] = set()
    for share in shares:
        for key, entry in share["table"].items():
            if table.setdefault(key, entry) != entry:
                raise PlanError(f"ranks disagree about {key}: {table[key]} and {entry}", code="ranks-disagree")
        scalars.update(share["scalars"])
        ties.update(map(tuple, share["tied"]))
        if share["groups"] is None:
            continue
        groups = groups or [{"names": [], "options": g["options"]} for g in share["groups"]]
        if [g["options"] for g in groups] != [g["options"] for g in share["groups"]]:
            raise PlanError("ranks disagree about the optimizer's parameter groups", code="ranks-disagree")
        for group, more in zip(groups, share["groups"], strict=True):
            group["names"] += [name for name in more["names"] if name not in group["names"]]
    return {"table": table, "scalars": scalars, "groups": groups, "tied": sorted(ties)}


def _finish(folder: Path, staging: Path, shared: dict[str, Any], content: _Content) -> None:
    """On rank 0: check what was written against what the ranks hold, write the side files, put it in place."""
    metadata = dcp.Reader(staging).read_metadata()
    written = dcp.tensors_in(metadata)
    for key, (shape, dtype) in shared["table"].items():
        if key not in written or [list(written[key][0]), str(written[key][1])] != [shape, dtype]:
            raise PlanError(
                f"{key} is {dtype}{shape} in the model, {written.get(key)} as written", code="checkpoint-write"
            )
        dcp.check_complete(metadata, key)
    versions = {"meshplan": _version(), "torch": torch.__version__}
    side = {k: shared[k] for k in ("groups", "scalars", "tied")}
    _write(staging / SIDECAR, json.dumps({"format": FORMAT, "versions": versions, **side, "extra": content.extra}))
    if content.plan is not None:
        _write(staging / PLAN, content.plan)
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.replace(folder, previous)  # a reader finds it there until the next line is done
    os.replace(staging, folder)
    shutil.rmtree(previous, ignore_errors=True)


def _write(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _make_room(folder: Path, staging: Path) -> None:
    try:
        if folder.exists():
            names = [f.name for f in folder.iterdir()] if folder.is_dir() else [folder.name]
            foreign = [n for n in names if n not in (dcp.METADATA, PLAN, SIDECAR) and not n.endswith(".distcp")]
            if foreign:
                raise PlanError(
                    f"{folder} holds {foreign[0]!r}, which is no part of a checkpoint and would be lost",
                    code="not-a-checkpoint",
                    legal="a new path, or one that holds a checkpoint and nothing else",
                )
        shutil.rmtree(staging, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise PlanError(f"{folder}: {e}", code="checkpoint-write") from e


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _settled(folder: Path) -> Path:
    """Where the newest complete checkpoint of `folder` is: a save may have been cut between its two renames."""
    return _previous(folder) if not folder.exists() and _previous(folder).exists() else folder


def _sidecar(folder: Path) -> dict[str, Any] | None:
    """The contents of `meshplan.json`, None where another program wrote the checkpoint."""
    file = folder / SIDECAR
    if not file.is_file():
        return None
    try:
        side = json.loads(file.read_text())
        known = side["format"]
    except (ValueError, KeyError, TypeError) as e:
        raise PlanError(f"{file} cannot be read: {e}", code="damaged-checkpoint") from e
    if known != FORMAT:
        raise PlanError(
            f"{file} has format {known}, written by meshplan {side.get('versions', {}).get('meshplan')}",
            code="checkpoint-format",
            legal=f"format {FORMAT}",
        )
    return side


def _lowered(model: nn.Module) -> Any:
    import meshplan  # not at the top: the package's front door imports this file

    find = getattr(meshplan, "lowered", None)
    if find is None:
        return None
    try:
        return find(unwrapped(model))
    except PlanError:  # a plain model
        return None


def _parts(model: nn.Module) -> dict[str, Parts]:
    """Parameter name -> axis -> sizes of its fused parts, as the plan it was lowered under has them."""
    out: dict[str, Parts] = {}
    for entry in getattr(_lowered(model), "placements", None) or ():
        row = entry if isinstance(entry, Mapping) else vars(entry)
        layout = {a: parse_placement(p) if isinstance(p, str) else p for a, p in row["layout"].items()}
        fused = {a: p.parts for a, p in layout.items() if isinstance(p, Shard) and p.parts is not None}
        if fused:
            out[row["name"]] = fused
    return out


def _version() -> str:
    try:
        return importlib.metadata.version("meshplan")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "source"
