"""Changing layouts while propagating: each redistribution is made once a tensor and hosted where it costs least."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshplan.compiler.few_heads import sub_axes
from meshplan.compiler.frames import common_host
from meshplan.compiler.kinds import A, I, Kind, N, P, Pending, R, normal, replicated, user_letter
from meshplan.compiler.known import Known
from meshplan.compiler.layout import Info, axis_size
from meshplan.compiler.sites import Move, Site
from meshplan.errors import PlanError, Where
from meshplan.plan.placements import Partial, Placement, Replicate, Shard, parts_inside
from meshplan.runtime import boundary


class Redistributing(Known):
    """The part of a propagation that moves tensors from kind to kind."""

    def at_site(self, x: Tensor, site: Site, declared: dict[str, Placement]) -> Tensor:
        """Bring `x` to what the plan declares at this site and to what earlier passes decided."""
        decided = self.decisions.moves.get(site, {})
        for k, axis in enumerate(self.axes):
            have = self.info(x).kinds[k]
            if axis.name in decided:
                x = self.to_kind(x, k, decided[axis.name], site)
            elif axis.name in declared:
                place = declared[axis.name]
                if isinstance(place, Shard):
                    kind = self._declared_shard(place, x, axis.name, site)
                    if have != kind:
                        x = self.hosted(x, k, kind, None, site)
                elif isinstance(place, Replicate) and not replicated(have):
                    x = self.hosted(x, k, R if isinstance(have, Shard) else I, None, site)
                elif isinstance(place, Partial) and have != P:
                    raise PlanError(
                        f"{site} is declared P on {axis.name} but is {self.show(x)}",
                        code="not-partial", module=site.module, legal="R or S(d)",
                    )  # fmt: skip
        return x

    def _declared_shard(self, place: Shard, x: Tensor, axis: str, site: Site) -> Kind:
        ndim = self.trace.values[self.info(x).value].dim()
        if not -ndim <= place.dim < ndim:
            raise PlanError(
                f"{site} is declared {place} on {axis}, and is a tensor of {ndim} dims", code="dim-out-of-range",
                module=site.module, legal=f"S({-ndim}) to S({ndim - 1})" if ndim else "R: a number has no dim to split",
            )  # fmt: skip
        return normal(place, ndim)

    def to_kind(self, x: Tensor, k: int, want: Kind, site: Site, where: Where | None = None) -> Tensor:
        """Move `x` to kind `want` on axis number `k`, here and now, reporting it at `site`."""
        info, axis = self.info(x), self.axes[k]
        have = info.kinds[k]
        grad = x.requires_grad and torch.is_grad_enabled()
        if have == want or (have == N and want in (R, I)):
            return x
        if isinstance(have, Pending) and x.requires_grad and not grad and want in (R, I):
            return x  # a use with gradients off has no say in whose the gradient is
        if isinstance(have, Pending):
            if want in (R, I):
                have.need(want)  # type: ignore[arg-type]
                return x
            have.need(R)
            have = R
        if replicated(have) and want in (R, I) and not grad:
            return x
        if isinstance(have, Shard) and have.copies > 1:
            return self.to_kind(self._own_share(x, k, have, site, where), k, want, site, where)
        src = "S" if isinstance(have, Shard) else str(have)
        dst = "S" if isinstance(want, Shard) else str(want)
        if src == "S" and dst in "SP":
            # Through the full value: a shard of one dim does not become one of another in place, nor a summand.
            return self.to_kind(self.to_kind(x, k, R, site, where), k, want, site, where)
        if not grad:
            src = "N" if src in "RI" else src
            dst = "N" if dst in "RI" else dst
            want = N if dst == "N" else want
        if src == "A" and dst == "R":
            return self.to_kind(self.to_kind(x, k, I, site, where), k, R, site, where)
        shape = self.trace.values[info.value].shape
        if isinstance(want, Shard) and want.dim >= len(shape):
            raise PlanError(
                f"{site}: one call is handed {self.show(x)}, and another wants its tensor split on dim {want.dim}",
                code="calls-differ", module=site.module, where=where, legal="a module of its own for each use",
            )  # fmt: skip
        dim = have.dim if isinstance(have, Shard) else want.dim if isinstance(want, Shard) else 0
        size = axis_size(shape, dim, info.kinds, self.axes, k) if "S" in (src, dst) else 0
        split = next((kind.parts for kind in (have, want) if isinstance(kind, Shard) and kind.parts), None)
        around = zip(info.kinds[:k], self.axes[:k], strict=True)
        outer = [(kind.parts, a.degree) for kind, a in around if isinstance(kind, Shard) and kind.dim == dim]
        parts = parts_inside(split, outer) if split else None
        move = Move(axis.name, src, dst, dim, size, have, want, parts)
        if (src, dst) not in boundary.MOVES or (split and (parts is None or sum(parts) != size)):
            raise PlanError(
                f"{site}: {self.show(x)} cannot become {user_letter(want)} on {axis.name}",
                code="no-redistribution", module=site.module, where=where,
            )  # fmt: skip
        inner = self._inner_shard(info, dim, k) if "S" in (src, dst) else None
        if inner is not None:
            # Changing an outer axis while an inner one still splits the dim would interleave the pieces.
            held = info.kinds[inner]
            x = self.to_kind(self.to_kind(x, inner, R, site, where), k, want, site, where)
            return self.to_kind(x, inner, held, site, where)
        mate = boundary.halves(src, dst, axis.group, move.parts)[1]
        self.paused = True
        out = self.result.timeline.moved(
            site,
            f"{user_letter(have)} -> {user_letter(want)} {axis.name}",
            lambda: boundary.move(x, src, dst, axis.group, dim, size, move.parts),
            (lambda g: mate(g, axis.group, dim, size)) if grad else None,
            self.show(x),
            where,
        )
        self.paused = False
        if site.side == "input" and src == "S" and not move.parts:
            self.result.timeline.gathered(site.module, out, x)
        kinds = list(info.kinds)
        kinds[k] = want
        self._record(site, move, where)
        param = None if site.side == "call" else info.param  # no longer the parameter that views stand before
        return self.label(out, Info(info.value, kinds, info.data, param, info.source))

    def _own_share(self, x: Tensor, k: int, have: Shard, site: Site, where: Where | None) -> Tensor:
        """Of a shard that neighbouring ranks have copies of, this rank's own part: replicated becomes sharded among them."""
        info, axis = self.info(x), self.axes[k]
        group = self.chooser.groups.group(sub_axes(axis.name)[1])
        size = axis_size(self.trace.values[info.value].shape, have.dim, info.kinds, self.axes, k + 1)
        src = "R" if x.requires_grad else "N"
        move = Move(sub_axes(axis.name)[1], src, "S", have.dim, size, have, Shard(have.dim))
        self.paused = True
        out = self.result.timeline.moved(
            site, f"{have} -> {move.dst_kind} {axis.name}", lambda: boundary.move(x, src, "S", group, have.dim, size),
            (lambda g: boundary.MOVES[src, "S"][1](g, group, have.dim, size)) if x.requires_grad else None, self.show(x), where,
        )  # fmt: skip
        self.paused = False
        kinds = list(info.kinds)
        kinds[k] = Shard(have.dim)
        self._record(site, move, where)
        return self.label(out, Info(info.value, kinds, info.data, info.param, info.source))

    def _inner_shard(self, info: Info, dim: int, k: int) -> int | None:
        """The innermost axis inside axis number `k` that splits `dim` too."""
        for j in range(len(self.axes) - 1, k, -1):
            kind = info.kinds[j]
            if isinstance(kind, Shard) and kind.dim == dim:
                return j
        return None

    def hosted(
        self, x: Tensor, k: int, want: Kind, where: Where | None, site: Site | None = None, leaf: int = 0
    ) -> Tensor:
        """A redistribution that an op or a declaration asks for: done once a tensor, hosted where it costs least."""
        axis = self.axes[k]
        if want == R and self.info(x).kinds[k] in (P, A):
            want = I  # a sum is whole on every rank; whoever then uses it in a split computation asks for R
        here = site or self._host(x, leaf, axis.name)
        if here.side in ("input", "output") and axis.name in self.declared(here.module, here.side, here.key):
            self.decisions.declared.add(here)
        own = self.info(x).param is not None and here.side == "call"  # a parameter is viewed anew at each use
        apart = here.module if here.side == "param" else str(here) if own else self._handed_anew(x)
        # Made with gradients off, it carries none: good for a use that asks for none, and for no other.
        live = x.requires_grad and torch.is_grad_enabled()
        key = (id(x), axis.name, str(want), apart, live)
        found = self.memo.get(key) or self.memo.get((*key[:-1], True))
        if found is not None and not own:
            made, first, frames, moves = found
            if site is None and here.side == "output":
                here = self._own_call(leaf)  # moved there, it would be so for those who have used it as it is
            self._share(x, k, want, first, here, frames, moves, where, site is None)
            return made
        started = len(self.result.moves)
        have = self.info(x).kinds[k]
        if site is None and here.side in ("input", "output"):
            self.late.append((here, axis.name))
        if isinstance(have, Shard) and want == R:
            out = self._gather(x, k, here, where)
            if site is None and here.side == "input" and not x.requires_grad:
                self.decisions.add(here, axis.name, R, where)
        elif replicated(have) and want == I:
            out = self.to_kind(x, k, I, here, where)
        else:
            out = self.to_kind(x, k, want, here, where)
        self.memo[key] = (out, here, self.frames.snapshot(), [m for _, m, _ in self.result.moves[started:]])
        self.keep.append(x)
        if (
            site is None
            and here.side in ("input", "output")
            and out is not x
            and not (isinstance(have, Shard) and want == R)
        ):
            self.decisions.add(here, axis.name, self.info(out).kinds[k], where)
        return out

    def _handed_anew(self, x: Tensor) -> str:
        """The running FSDP unit that was handed `x`: FSDP2 gives it a tensor of its own, unknown to redistributions outside."""
        if not (x.requires_grad or self.casts):
            return ""
        held = (f"{f.path}:{f.serial}" for f in reversed(self.frames.stack) if f.path in self.units and id(x) in f.inputs)
        return next(held, "")

    def _gather(self, x: Tensor, k: int, site: Site, where: Where | None) -> Tensor:
        axis = self.axes[k].name
        settled = self.decisions.gathered.get((site, axis))
        out = self.to_kind(x, k, settled or R, site, where)
        if settled is None and out.requires_grad:
            # Whether the gradient comes back partial or whole is up to whoever uses the gathered value.
            pending = Pending((site, axis), True)
            self.info(out).kinds[k] = pending
            self.gathers.append((site, axis, pending, where))
        return out

    def _host(self, x: Tensor, leaf: int, axis: str) -> Site:
        info, contested = self.info(x), self.decisions.contested
        if self.frames.stack and id(x) in self.frames.stack[-1].inputs:
            entry = Site("input", self.stack.path, self.frames.stack[-1].inputs[id(x)])
            # Gathered at the entry, what the model itself is handed would be whole in all of the model: one use of a data axis's
            # shards that needs them all (labels made of the tokens) must not undo the split for the others.
            undoes = self.stack.path == "" and self.axes[self.index[axis]].data and not x.requires_grad
            if (entry, axis) not in contested and not undoes:
                return entry
        if info.param is not None and self._viewed(info):
            return Site("param", self.stack.path, info.param)
        produced = self.frames.output_of(x)
        if produced and P in info.kinds and (Site("output", *produced), axis) not in contested:
            return Site("output", *produced)
        return self._own_call(leaf)

    def _own_call(self, leaf: int) -> Site:
        return Site("call", self.stack.path, f"{self.stack.ordinal}:{leaf}")

    def _viewed(self, info: Info) -> bool:
        """Whether the running module may see a parameter through a redistribution: its own, used by one call, and without
        a collective, since code may look at a parameter more often than it computes with it."""
        path = self.stack.path
        if path not in self.holders[info.param or ""] or any(isinstance(k, Shard) for k in info.kinds):
            return False
        users = [c for c in self.trace.calls if info.value in c.ins]
        # Another module that reaches into this one for its parameter looks through the same view.
        if not {c.module for c in users} <= self.holders[info.param or ""]:
            return False
        return len({c.ordinal for c in users if c.module == path}) <= 1

    def _share(
        self,
        x: Tensor,
        k: int,
        want: Kind,
        first: Site,
        here: Site,
        frames: Any,
        moves: list[Move],
        where: Where | None,
        implicit: bool,
    ) -> None:
        """A second use of the same redistribution: host it once, at the nearest common module that was handed the tensor;
        where there is none, the first site to run keeps the result for the others."""
        started = next((f.serial for f in reversed(frames) if f.path == here.module), None)
        if first == here and started in (None, self.result.invocations.current(here.module, self.frames.stack)):
            return
        host = common_host(x, frames, self.frames.snapshot())
        axis = self.axes[k].name
        gathered = isinstance(self.info(x).kinds[k], Shard) and want in (R, I)
        kind = self.decisions.gathered.get((first, axis), R) if gathered else want
        if host is not None and (Site("input", *host), axis) not in self.decisions.contested:
            site = Site("input", *host)
            if here in self.decisions.declared:
                self.decisions.declared.add(site)
            if site != first:
                self.decisions.add(site, axis, kind, where)
            return
        outer = self._enclosing(x, axis, first, here)
        if outer is not None:
            self.decisions.add(outer, axis, kind, where)
            return
        if implicit and here.side == "input":
            # At its entry, for all that the module does with it: code before this use has seen it as it was handed over, and
            # equals of the module are handed the same.
            self.decisions.add(here, axis, kind, where)
            return
        self.result.shared |= {first, here}
        for move in moves:
            self._record(here, move, where)

    def _enclosing(self, x: Tensor, axis: str, *sites: Site) -> Site | None:
        """Of the module inputs at which `x` is moved, one whose module calls another of them: what it moves at its entry is
        what the inner one is handed, so it must be decided before the inner one asks."""
        found = self.moved_inputs.setdefault((id(x), axis), [])
        found += [site for site in sites if site.side == "input" and site not in found]
        for outer in found:
            if (outer, axis) not in self.decisions.contested and any(
                inner.module.startswith(f"{outer.module}.") for inner in found if outer.module
            ):
                return outer
        return None

    def _record(self, site: Site, move: Move, where: Where | None) -> None:
        if boundary.collectives_of(move.src, move.dst)[0]:
            self._refuse_in_checkpoint(f"{site} goes {move.src} -> {move.dst} on {move.axis}", site.module, where)
        self.result.moves.append((site, move, where))
        self.result.invocations.owners.append(self.result.invocations.current(site.module, self.frames.stack))
