"""Whether a program is fit to be compared: finite, not so ill-conditioned that rounding shows, and with a loss."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from meshplan.verify.simulate import Run, run_single

LARGE = 1e6
NOISE, UNSTABLE = (
    1e-13,
    1e-10,
)  # relative noise in what goes in, and the change of a gradient from which it says nothing


def finite(single: nn.Module, batch: dict[str, Tensor], seed: int) -> bool:
    """Whether every result (but for the infinities of masks) and every gradient of one device is an ordinary number."""
    run, _ = run_single(single, batch, seed)
    made = [o for e in run.log.entries for o in e.outs if o.is_floating_point() and "empty" not in e.name]
    grads = [g for e in run.log.entries for g in e.grads.values()] + list(run.grads.values())
    return all(bool(g.isfinite().all()) for g in grads) and not any(bool(o.isnan().any()) or _large(o) for o in made)


def _large(t: Tensor) -> bool:
    held = t[t.isfinite()]
    return bool(held.numel()) and float(held.abs().max()) > LARGE


def unstable(single: nn.Module, batch: dict[str, Tensor], seed: int) -> bool:
    """Whether noise in parameters and inputs, of the size of rounding, moves a result or a gradient by much more."""
    moved, generator = copy.deepcopy(single), torch.Generator().manual_seed(1)

    def noisy(t: Tensor) -> Tensor:
        return t * (1 + NOISE * torch.randn(t.shape, generator=generator, dtype=t.dtype))

    with torch.no_grad():
        for p in moved.parameters():
            p.copy_(noisy(p))
    near = {name: noisy(t) if t.is_floating_point() else t for name, t in batch.items()}
    one, other = run_single(single, batch, seed)[0], run_single(moved, near, seed)[0]
    scale = max((float(g.abs().max()) for g in one.grads.values() if g.numel()), default=1.0)
    made = [o for e in one.log.entries for o in e.outs], [o for e in other.log.entries for o in e.outs]
    grads = [(g, other.grads[name]) for name, g in one.grads.items()]
    for entry, twin in zip(one.log.entries, other.log.entries, strict=True):
        grads += [(g, twin.grads[k]) for k, g in entry.grads.items() if k in twin.grads]
    return tied(one) or reordered(one, other) or any(_moves(a, b, 1e-6 * scale) for a, b in grads) or any(
        _moves(a, b, 1e-6) for a, b in zip(*made, strict=True) if a.is_floating_point()
    )


def tied(run: Run) -> bool:
    """Whether values that are put in order are equal but for rounding: which comes first is then up to that."""
    ordered = [e.outs[0].flatten().sort().values for e in run.log.entries if e.name in ("sort", "topk") and e.outs]
    return any(bool((v[1:] - v[:-1] < 1e-9).any()) for v in ordered if v.is_floating_point())


def reordered(one: Run, other: Run) -> bool:
    """Whether places without values, which a rank would have to find alike, differ between two runs that are equal but for
    rounding."""
    pairs = zip(one.log.entries, other.log.entries, strict=True)
    return any(not torch.equal(a.outs[0], b.outs[0]) for a, b in pairs if a.name in ("argsort", "argmax", "argmin"))


def _moves(a: Tensor, b: Tensor, floor: float) -> bool:
    kept = a.isfinite() & b.isfinite()
    a, b = a[kept], b[kept]
    return bool(a.numel()) and float((a - b).abs().max()) > UNSTABLE * max(float(a.abs().max()), floor)


def scalar_loss(single: nn.Module, batch: dict[str, Tensor]) -> Tensor | None:
    """The first 0-dim result."""
    with torch.no_grad():
        out = single(**batch)
    found = list(out.values()) if isinstance(out, dict) else list(out) if isinstance(out, tuple) else [out]
    return next((o for o in found if isinstance(o, Tensor) and o.dim() == 0), None)
