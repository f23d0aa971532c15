"""The choice as a mixed-integer program: one option a call, one kind a parameter, moves where kinds differ; solved by HiGHS.

Variables: x[n, o] = 1 if call n runs as its option o; y[v, k] = 1 if parameter or input v is placed as k; z[v, a, b] = 1 if
value v, made as a, is moved to b (once, however many calls take it so). Minimise the modelled seconds of calls and moves under

    sum_o x[n, o] = 1,    sum_k y[v, k] = 1,
    sum_{o takes v as b} x[n, o] <= made[v, b] + sum_a z[v, a, b]     for every call n that takes v,
    z[v, a, b] <= made[v, a],                                        made[v, k] = the x or y that make v as k,
    sum_v bytes(v, k) y[v, k] <= memory.

With x and y integral, z is too. The form is that of a Markov random field over layouts, as in Zheng et al. 2022 (Alpa,
section 4), except that a move is paid once a value and not once an edge. scipy's `milp` is HiGHS: it proves a bound, it was the
fastest free solver on problems of this form, and scipy is on every machine that trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from meshplan.errors import PlanError

LOOSE = 0.05
"""Relative gap above which another way to a solution is tried."""


@dataclass
class Problem:
    """Rows and columns of one mixed-integer program, filled one at a time."""

    cost: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)  # costs without latency
    integral: list[bool] = field(default_factory=list)
    _rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def column(self, cost: float, integral: bool, bare: float = 0.0) -> int:
        """A variable between 0 and 1."""
        self.cost.append(cost)
        self.bare.append(bare)
        self.integral.append(integral)
        return len(self.cost) - 1

    def row(self, terms: dict[int, float], low: float, high: float) -> None:
        self._rows.append((terms, low, high))

    def best(self, seconds: float, gap: float) -> Solution:
        """As `solve`; where that leaves a wide gap, the better of it and of the solution without latencies, which are charges
        a move however small, and what makes relaxations of small programs loose."""
        try:
            found = self.solve(seconds, gap)
            if found.objective - found.bound <= LOOSE * found.objective:
                return found
        except PlanError:
            found = None
        cost, self.cost = self.cost, self.bare
        try:
            other = self.solve(seconds, gap)
        except PlanError:
            if found is None:
                raise
            return found
        finally:
            self.cost = cost
        objective = float(np.dot(cost, other.values))
        if found is not None and found.objective <= objective:
            return found
        return replace(other, objective=objective, bound=found.bound if found is not None else other.objective)

    def solve(self, seconds: float, gap: float, longer: bool = True) -> Solution:
        """The best values found within `seconds`, to a relative `gap`; if there are none yet, four times as long is tried.
        Raises PlanError `no-placement` if there are none even then."""
        at = [(r, c, w) for r, (terms, _, _) in enumerate(self._rows) for c, w in terms.items()]
        rows, columns, weights = zip(*at, strict=True) if at else ((), (), ())
        matrix = csr_matrix((weights, (rows, columns)), shape=(len(self._rows), len(self.cost)))
        scale = max(max(self.cost, default=0.0), 1e-12)
        found = milp(
            np.asarray(self.cost) / scale,
            integrality=np.asarray(self.integral, dtype=int),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(
                matrix, [low for _, low, _ in self._rows], [high for _, _, high in self._rows]
            ),
            options={"time_limit": seconds, "mip_rel_gap": gap},
        )
        if found.x is None and found.status == 1 and longer:
            return self.solve(4 * seconds, gap, False)
        if found.x is None:
            raise PlanError(
                "no placement satisfies the memory bound and what the operations allow" if found.status == 2
                else f"the solver found no placement in {seconds:.0f} s",
                code="no-placement", legal="a larger memory bound, a larger mesh, or more solver time",
            )  # fmt: skip
        bound = found.mip_dual_bound if found.mip_dual_bound is not None else found.fun
        return Solution(found.x, float(found.fun) * scale, float(bound) * scale, len(self.cost), len(self._rows))


@dataclass(frozen=True)
class Solution:
    """Values of the variables, the objective and the proved lower bound (both in the problem's unit), and the size."""

    values: np.ndarray
    objective: float
    bound: float
    columns: int
    rows: int

    def on(self, column: int) -> bool:
        return bool(self.values[column] > 0.5)
