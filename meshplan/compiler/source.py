"""Where in the user's code a torch call was made: the innermost frame outside torch and meshplan."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch

import meshplan
from meshplan.errors import Where

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(meshplan.__file__).parent)
_MODELS = str(Path(meshplan.__file__).parent / "models")


def call_site(depth: int = 2) -> Where | None:
    """File and line of the nearest caller that is the user's (a shipped model counts as the user's)."""
    frame = sys._getframe(depth)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return Where(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def raised_at(error: BaseException) -> Where | None:
    """File and line of the user's innermost frame that `error` went through."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((Where(name, line) for name, line in reversed(lines) if _is_users(name)), None)


def raised_by_us(error: BaseException) -> bool:
    """Whether `error` is a fault of meshplan's own Python code, not of the model's or of a torch call."""
    innermost = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    ours = innermost.startswith(_OURS) and not innermost.startswith(_MODELS)
    return ours and not isinstance(error, RuntimeError | ValueError)


def _is_users(name: str) -> bool:
    ours = name.startswith(_OURS) and not name.startswith(_MODELS)
    return not (name.startswith(_TORCH) or ours or name.startswith("<"))
