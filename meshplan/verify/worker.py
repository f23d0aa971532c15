"""What one rank of the pool does: wait for a call, run it inside a fresh process group, answer, and wait again."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from meshplan import compat
from meshplan.mesh import build
from meshplan.runtime import batch


@dataclass(frozen=True)
class Call:
    """One function call on the first `world` ranks.

    Attributes:
        fn: a module-level function or a `functools.partial` of one (pickled by reference).
        args: its positional arguments.
        kwargs: its keyword arguments.
        world: size of the default process group the call runs in.
        key: prefix of this call's keys in the store, never used twice.
        timeout: seconds after which a collective of the call fails by itself.
        sys_path: the caller's import path, so that what it can import a rank can import too.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    world: int
    key: str
    timeout: float
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class Reply:
    """A rank's answer: `value`, or `error` (None where the exception cannot be pickled) with its `trace`.

    `at` is the monotonic clock in seconds when the call ended; the clock is the machine's, hence comparable over ranks.
    """

    at: float
    value: Any = None
    error: BaseException | None = None
    trace: str | None = None


def serve(rank: int, conn: Connection, port: int, backend: str) -> None:
    """Answer calls from `conn` until it closes. The store is the parent's, on loopback at `port`."""
    # Ctrl-C reaches the whole foreground group; only the parent should decide what becomes of the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    gc.freeze()  # torch's own objects stay for good; looking through them after each call would cost 0.1 s
    conn.send_bytes(b"ready")
    while True:
        try:
            _serve_one(rank, conn, store, backend)
        except (EOFError, OSError):
            return  # the parent has left


def _serve_one(rank: int, conn: Connection, store: dist.Store, backend: str) -> None:
    request = conn.recv_bytes()
    try:
        # The import path must be in place before the function is unpickled, so it travels in front of it.
        sys_path, body = pickle.loads(request)
        sys.path.extend(p for p in sys_path if p not in sys.path)
        call: Call = pickle.loads(body)
        group = _ProcessGroup(rank, call, store, backend)
    except Exception as error:
        conn.send_bytes(_failure(error))
        return
    torch.manual_seed(0)  # ranks build equal models, and a call does not depend on those before it
    with group:
        try:
            reply, done = pickle.dumps(Reply(time.monotonic(), call.fn(*call.args, **call.kwargs))), True
        except (Exception, SystemExit) as error:
            reply, done = _failure(error), False
        conn.send_bytes(reply)
        if done:
            # Leaving closes sockets, under a peer perhaps still in its last collective: the parent says when all are
            # through. A rank that failed leaves at once, so that its peers fail too instead of waiting for it.
            conn.recv_bytes()


def _failure(error: BaseException) -> bytes:
    at, trace = time.monotonic(), traceback.format_exc()
    error = error.with_traceback(None)
    error.__cause__ = error.__context__ = None
    try:
        reply = pickle.dumps(Reply(at, error=error, trace=trace))
        pickle.loads(reply)  # some exceptions pickle but do not come back
        return reply
    except Exception:
        return pickle.dumps(Reply(at, trace=trace))


class _ProcessGroup:
    """The default process group of one call. On the way out every group is destroyed and every cache that may hold
    a mesh of the old groups is emptied, because group names start again at 0 and equal meshes compare equal."""

    def __init__(self, rank: int, call: Call, store: dist.Store, backend: str) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(call.world))
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(call.key, store),
            rank=rank,
            world_size=call.world,
            timeout=timedelta(seconds=call.timeout),
        )

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        compat.clear_mesh_caches()
        # What still holds a group keeps its threads alive, and these spin once a peer has closed its end.
        build.forget()
        batch.forget()
        gc.collect()
