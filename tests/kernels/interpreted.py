"""Tests of Triton kernels without a GPU: their bodies run in one other process, where Triton interprets."""

from __future__ import annotations

import atexit
import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test of a module's top level where TRITON_INTERPRET was set before Triton was imported.

    That cannot be here: what compiles kernels, torch's inductor among it, needs a Triton that does not interpret.
    """

    @functools.wraps(test)
    def outside(*args: Any, **kwargs: Any) -> None:
        if os.environ.get("TRITON_INTERPRET") == "1":
            return test(*args, **kwargs)
        return _process().submit(_run, test.__module__, test.__name__, args, kwargs).result()

    return outside


@functools.cache
def _process() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_begin)
    atexit.register(pool.shutdown, wait=False, cancel_futures=True)
    return pool


def _begin() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"


def _run(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name)(*args, **kwargs)
