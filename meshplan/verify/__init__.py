"""verify: single device against ranks, and the receipts that record it. `meshplan.verify(...)` is this package, called."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Verify(ModuleType):
    """The package under a name that the contract also gives to a function: calling it runs `verify.run.verify`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from meshplan.verify.run import verify

        return verify(*args, **kwargs)


sys.modules[__name__].__class__ = _Verify
