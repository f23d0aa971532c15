"""A pool of warm ranks on this machine: spawned once, given functions to run, restarted when one is lost."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from meshplan.errors import PlanError
from meshplan.verify.worker import Call, Reply, serve

# Once one rank has failed, the others get this long (seconds) to notice: gloo tells peers when a socket closes.
GRACE = 5.0
# Seconds the interpreters may take to start and import torch.
START = 120.0

_pools: list[RankPool] = []


class RankPool:
    """`n` processes that keep torch imported and run functions as the ranks of a process group.

    Every call gets a default process group of its own, of exactly `world` ranks, and leaves none behind. A call that
    fails raises the exception of the rank that failed first; its `__cause__` is a `PlanError` with the tracebacks of
    all ranks. After a call that some rank did not answer, the processes are replaced at the next call.

    Arguments:
        n: number of ranks.
        backend: torch.distributed backend; ranks compute on CPU, so "gloo".
        timeout: seconds a call may take unless `run` says otherwise.

    Example:
        with RankPool(4) as pool:
            pool.run(my_function, 3, world=2)   # my_function(3) on ranks 0 and 1 -> [result0, result1]
    """

    def __init__(self, n: int, backend: str = "gloo", timeout: float = 120.0) -> None:
        if n < 1:
            raise PlanError(f"a pool needs at least one rank, not {n}", code="bad-world-size", legal="n >= 1")
        self.n, self.backend, self.timeout = n, backend, timeout
        self._calls = 0
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._store: dist.TCPStore | None = None
        _pools.append(self)
        atexit.register(self.close)

    def run(
        self, fn: Callable[..., Any], *args: Any, world: int | None = None, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """`fn(*args, **kwargs)` on the first `world` ranks (default: all); their results in rank order.

        Raises:
            The first exception a rank raised, if one did. PlanError `not-importable` when `fn` or an argument cannot be
            pickled, `rank-timeout` when ranks did not answer in `timeout` seconds, `rank-died` when a process ended.
        """
        world = self.n if world is None else world
        if not 1 <= world <= self.n:
            raise PlanError(
                f"world {world} does not fit a pool of {self.n} ranks", code="bad-world-size", legal=f"1 to {self.n}"
            )
        limit = self.timeout if timeout is None else timeout
        self._calls += 1
        request = _pickle(Call(fn, args, kwargs, world, f"call{self._calls}", limit, tuple(sys.path)))
        try:
            if not self._workers:
                self._start()
            for _, conn in self._workers[:world]:
                conn.send_bytes(request)
            replies = self._collect(world, limit)
        except BaseException:
            self._discard()
            raise
        return _results(replies)

    def close(self) -> None:
        """End the processes. The pool starts again if it is used again."""
        self._discard()
        if self in _pools:
            _pools.remove(self)
        atexit.unregister(self.close)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self) -> None:
        # The parent holds the store: it outlives any rank, and a new pool of processes can meet in it again.
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for rank in range(self.n):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=serve, args=(rank, theirs, self._store.port, self.backend), daemon=True
            )
            with _one_order_of_sets():
                process.start()
            theirs.close()
            self._workers.append((process, ours))
        deadline = time.monotonic() + START
        for rank, (process, conn) in enumerate(self._workers):
            if not _answers(conn, max(0.0, deadline - time.monotonic())):
                raise PlanError(
                    f"rank {rank} of the pool did not start ({_ending(process)})",
                    code="rank-died",
                    legal="a script that starts ranks guards its body with `if __name__ == '__main__':`",
                )

    def _collect(self, world: int, limit: float) -> dict[int, Reply]:
        waiting = {conn: rank for rank, (_, conn) in enumerate(self._workers[:world])}
        replies: dict[int, Reply] = {}
        died: dict[int, str] = {}
        start = time.monotonic()
        deadline = start + limit
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for conn in ready:
                assert isinstance(conn, Connection)
                rank = waiting.pop(conn)
                try:
                    replies[rank] = pickle.loads(conn.recv_bytes())
                except (EOFError, OSError):
                    died[rank] = _ending(self._workers[rank][0])
                if rank in died or replies[rank].trace is not None:
                    deadline = min(deadline, time.monotonic() + GRACE)
        silent = sorted(waiting.values())
        if died:
            ends = ", ".join(f"rank {rank} {how}" for rank, how in sorted(died.items()))
            raise PlanError(f"a rank died: {ends}{_traces(replies)}", code="rank-died")
        failed = any(reply.trace is not None for reply in replies.values())
        if silent and not failed:
            took = time.monotonic() - start
            raise PlanError(
                f"ranks {silent} of {world} did not answer within {took:.0f} s{_traces(replies)}", code="rank-timeout"
            )
        if silent:
            # Ranks stuck behind the failure of another are no use any more; the failure itself is raised by `run`.
            self._discard()
        for rank, reply in replies.items():
            if reply.trace is None and self._workers:
                self._workers[rank][1].send_bytes(b"leave")
        return replies

    def _discard(self) -> None:
        workers, self._workers = self._workers, []
        for _, conn in workers:
            conn.close()  # an idle rank leaves at once; a busy one is killed
        for process, _ in workers:
            process.join(0.2)
        for process, _ in workers:
            if process.is_alive():
                process.kill()
            process.join()


@contextmanager
def LocalPool(n: int, timeout: float = 120.0) -> Iterator[RankPool]:
    """A pool with at least `n` ranks: one that this process already has, or a new one that is closed on leaving."""
    for pool in reversed(_pools):
        if pool.n >= n:
            yield pool
            return
    with RankPool(n, timeout=timeout) as pool:
        yield pool


def _pickle(call: Call) -> bytes:
    try:
        return pickle.dumps((call.sys_path, pickle.dumps(call)))
    except Exception as error:
        raise PlanError(
            f"{call.fn!r} or its arguments cannot be sent to the ranks: {error}",
            code="not-importable",
            legal="a function at the top level of a module, or functools.partial of one, with picklable arguments",
        ) from error


def _answers(conn: Connection, seconds: float) -> bool:
    try:
        return conn.poll(seconds) and conn.recv_bytes() == b"ready"
    except (EOFError, OSError):
        return False


@contextmanager
def _one_order_of_sets() -> Iterator[None]:
    """Processes started here order the strings of a set alike: a model's code may iterate over one."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ.setdefault("PYTHONHASHSEED", "0")
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]


def _ending(process: BaseProcess) -> str:
    process.join(2.0)
    code = process.exitcode
    if code is None:
        return "closed its connection"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


def _traces(replies: dict[int, Reply]) -> str:
    return "".join(f"\n--- rank {rank}\n{reply.trace}" for rank, reply in sorted(replies.items()) if reply.trace)


def _results(replies: dict[int, Reply]) -> list[Any]:
    failed = sorted((reply.at, rank) for rank, reply in replies.items() if reply.trace is not None)
    if not failed:
        return [replies[rank].value for rank in sorted(replies)]
    first = failed[0][1]
    everything = PlanError(f"rank {first} failed first{_traces(replies)}", code="rank-failed")
    error = replies[first].error
    if error is None:
        raise everything
    raise error from everything
