"""What the fuzzer found, made short: each was wrong, crashed, hung, or was refused though the plan has a meaning."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshplan as mp
from meshplan.compiler.check_shrink import _Lengths
from meshplan.compiler.compile import compile_core
from meshplan.mesh.spec import MeshSpec
from meshplan.verify.aligned import align

S, R = mp.S, mp.R


def agrees(model: nn.Module, shapes: dict[str, tuple[int, ...]], mesh: dict[str, int], *rules: mp.Rule, **rest) -> None:
    """The plan on simulated ranks gives the single device's results and gradients; floating inputs, rows over dp."""
    place = {"dp": S(0)} if len(mesh) > ("tp" in mesh) else {}
    inputs = {name: mp.Input(shape, torch.float64, rest.pop("place", place)) for name, shape in shapes.items()}
    world = 1
    for n in mesh.values():
        world *= n
    align(model.double(), mp.Plan(mesh=mesh, inputs=inputs, rules=rules, **rest), world, check="values")


class Squares(nn.Module):
    """A module and the mean square of what it makes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def test_a_mean_over_a_dim_that_two_axes_split_unevenly():
    # 2 rows over 2 x 2 ranks: a rank without rows has no mean.
    rule = mp.Rule("inner", output={"tp": S(0)})
    agrees(Squares(nn.Linear(3, 4)), {"x": (2, 3)}, {"dp_shard": 2, "tp": 2}, rule)


@pytest.mark.parametrize("bias", [S(0), R])
def test_a_weight_of_fused_parts_beside_a_bias_in_one_piece(bias):
    params = {"weight": {"tp": S(0, [4, 4])}, "bias": {"tp": bias}}
    agrees(Squares(nn.Linear(3, 8)), {"x": (5, 3)}, {"tp": 2}, mp.Rule("inner", params=params))


LAYERS = [
    (nn.LayerNorm([4, 6]), "weight", 0), (nn.LayerNorm([4, 6]), "bias", 1), (nn.GroupNorm(2, 4), "weight", 0),
    (nn.Conv1d(4, 4, 3, groups=4), "weight", 2), (nn.BatchNorm1d(4).eval(), "bias", 0),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "name", "dim"), LAYERS, ids=str)
def test_a_parameter_split_where_no_shard_can_compute_is_gathered(layer, name, dim):
    agrees(Squares(layer), {"x": (3, 4, 6)}, {"tp": 2}, mp.Rule("inner", params={name: {"tp": S(dim)}}))


def test_a_weight_and_a_bias_split_along_different_dims():
    params = {"weight": {"tp": S(1)}, "bias": {"tp": S(0)}}
    agrees(Squares(nn.Linear(6, 5)), {"x": (3, 6)}, {"tp": 3}, mp.Rule("inner", params=params))


class Batchwise(nn.Module):
    """Something that needs every row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).softmax(0).square().sum()


@pytest.mark.parametrize("mesh", [{"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_a_dim_that_two_axes_split_becomes_whole(mesh):
    rules = [mp.Rule("inner", output={"tp": S(0)})] if "tp" in mesh else []
    agrees(Batchwise(), {"x": (4, 3)}, mesh, *rules)


class Disagreeing(nn.Module):
    """Three uses of one input, each best off with another layout of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.w = nn.Linear(4, 6), nn.Linear(4, 6), nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) * (x @ self.w)).square().sum() + self.b(x).amax(1).sum() + x.softmax(-1).sum()


@pytest.mark.parametrize("declared", [S(0), S(1), S(2), R])
def test_uses_that_disagree_about_the_layout_of_an_input(declared):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Disagreeing()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.tanh())

    rules = [mp.Rule("inner", params={"w": {"tp": S(1)}}, input={"x": {"tp": declared}})]
    rules += [mp.Rule("inner.a", params={"weight": {"tp": S(1)}}), mp.Rule("inner.b", params={"weight": {"tp": S(0)}})]
    agrees(Outer(), {"x": (2, 3, 4)}, {"tp": 2}, *rules)


class Normed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.norm(dim=-1, keepdim=True))


class Stack(nn.Module):
    """Equal layers, of which only the first is handed shards."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.layers = nn.ModuleList(Normed() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_equal_layers_do_not_repeat_what_only_the_first_had_to_gather():
    plan = mp.Plan(
        mesh={"tp": 2}, inputs={"x": mp.Input((3, 4), torch.float64)},
        rules=[mp.Rule("up", params={"weight": {"tp": S(0)}, "bias": {"tp": S(0)}})],
    )  # fmt: skip
    folded, whole = (compile_core(Stack().double(), plan, MeshSpec((("tp", 2),)), fold=fold) for fold in (True, False))
    moved = [[(b.site, b.move) for b in core.program.boundaries] for core in (folded, whole)]
    assert moved[0] == moved[1] and [s.module for s, _ in moved[0] if s.side == "input"] == ["layers.0"]
    align(Stack().double(), plan, 2)


class Causal(nn.Module):
    """A mask made at the rank's own sizes, on both of its dims."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return ((h @ h.mT).masked_fill(hidden, float("-inf")).softmax(-1) @ h).square().sum()


def test_a_square_mask_of_the_length_of_a_split_sequence():
    agrees(Causal(), {"x": (2, 4, 4)}, {"tp": 2}, mp.Rule("", input={"x": {"tp": S(1)}}), place={"tp": S(1)})


def test_small_relatives_of_a_length_that_leaves_a_rank_empty_run_out():
    lengths = _Lengths(SimpleNamespace(degree=3), 3)  # type: ignore[arg-type]
    assert [lengths.pick(n) for n in (4, 2, 8, 4)] == [4, 2, 8, 4]


class Written(nn.Module):
    """A whole buffer that shards are added to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(4, 4).double()
        total += self.inner(x)
        return total.square().sum()


def test_shards_added_in_place_to_what_is_whole():
    agrees(Written(), {"x": (4, 3)}, {"tp": 2}, mp.Rule("inner", use="colwise"))


def test_gathered_again_after_a_move_on_another_axis():
    rules = [mp.Rule("inner", output={"tp": S(0)}), mp.Rule("norm", params={"weight": {"tp": S(0)}})]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(3, 4), nn.GroupNorm(1, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.inner(x)).square().sum()

    recompute = {"units": ["norm"], "policy": "none", "gather": "regather"}
    agrees(Two(), {"x": (4, 3)}, {"dp_shard": 2, "tp": 2}, *rules, recompute=recompute)


class TwiceBiased(nn.Module):
    """A row-split projection whose bias is used once more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * (1 + self.bias)


def test_a_bias_that_is_a_summand_in_one_call_and_whole_in_another():
    agrees(Squares(TwiceBiased()), {"x": (3, 4)}, {"tp": 2}, mp.Rule("inner", params={"weight": {"tp": S(1)}}))


class Reaching(nn.Module):
    """A weight that its own module uses whole, and the model on shards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return F.linear(h.tanh(), self.inner.weight).square().sum() + h.sum()


def test_a_weight_used_whole_by_its_module_and_on_shards_by_another():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reaching, self.split = Reaching(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            h = self.reaching.inner(x)
            return F.linear(self.split(h.tanh()), self.reaching.inner.weight).square().sum()

    agrees(Outer(), {"x": (4, 4)}, {"tp": 2}, mp.Rule("split", output={"tp": S(0)}))


class Shared(nn.Module):
    """One module, called with what is split, with what is whole, and with a partial sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.shared = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return (self.shared(h) * self.shared(x) + self.shared(self.down(h))).square().sum()


@pytest.mark.parametrize("weight", [S(0), S(1), R])
def test_calls_of_one_module_that_are_handed_different_layouts(weight):
    rules = [mp.Rule("up", use="colwise"), mp.Rule("down", params={"weight": {"tp": S(1)}}, output={"tp": S(1)})]
    agrees(Shared(), {"x": (3, 4)}, {"tp": 2}, *rules, mp.Rule("shared", params={"weight": {"tp": weight}}))


def test_results_whose_gradient_is_nothing_or_zero():
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            kept, _ = h.sort(-1)
            return (kept - kept).sum() + torch.stack([h, h])[:0].sum()

    agrees(Flat(), {"x": (3, 4)}, {"tp": 2}, mp.Rule("inner", use="colwise"))


class Compared(nn.Module):
    """A plain tensor compared with a parameter, which Python turns around."""

    def __init__(self) -> None:
        super().__init__()
        self.floor = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > self.floor, x, self.floor).square().sum()


def test_a_comparison_that_python_asks_of_the_parameter():
    agrees(Compared(), {"x": (4, 3)}, {"dp_shard": 2})


class FewHeads(nn.Module):
    """Two key heads that four query heads repeat, of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1, keepdim=True)
        q, k, v = (p(x).view(x.shape[0], 1, -1, 2).transpose(1, 2) for p in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return ((q @ k.mT).softmax(-1) @ v).square().sum()


@pytest.mark.parametrize("query", [{}, {"use": "colwise"}])
def test_heads_whose_copies_do_not_help(query):
    rules = [mp.Rule("k", use="colwise"), mp.Rule("v", params={"weight": {"tp": S(0)}})]
    agrees(FewHeads(), {"x": (3, 5, 4)}, {"tp": 4}, *rules, *([mp.Rule("q", **query)] if query else []))


class Dropped(nn.Module):
    """Dropout of a look-up, and a vector that is one row of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 6), nn.Parameter(torch.randn(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (F.dropout(self.inner(x), 0.4, self.training) * self.scale).square().sum()


def test_a_verification_with_a_seed_of_its_own_has_its_dropout(pool):
    inputs = {"x": mp.Input((4, 4), torch.float64)}
    receipt = mp.verify(Dropped, mp.Plan(mesh={"tp": 2}, inputs=inputs), nproc=2, seed=3, steps=1)
    assert receipt.passed, str(receipt)


def test_a_parameter_of_which_a_rank_holds_nothing_stays_out_of_fsdp(pool):
    plan = mp.Plan(
        mesh={"dp_shard": 2, "tp": 2}, inputs={"x": mp.Input((4, 4), torch.float64, {"dp": S(0)})},
        rules=[mp.Rule("", params={"scale": {"tp": S(0)}})], fsdp={"units": ["inner"], "strategy": "zero3"},
    )  # fmt: skip
    receipt = mp.verify(Dropped, plan, nproc=4, steps=1)
    assert receipt.passed, str(receipt)


class Unfinished(nn.Module):
    """A layer whose result nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.spare = nn.Linear(4, 6), nn.Parameter(torch.randn(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        self.spare(h * self.scale)
        return h.square().mean()


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_replicate": 2}], ids=str)
def test_a_parameter_without_a_gradient_does_not_decay(pool, mesh):
    place = {} if "tp" in mesh else {"dp": S(0)}
    rules = [mp.Rule("inner", use="colwise")] if "tp" in mesh else []
    plan = mp.Plan(mesh=mesh, inputs={"x": mp.Input((4, 4), torch.float64, place)}, rules=rules)
    receipt = mp.verify(Unfinished, plan, nproc=2)
    assert receipt.passed, str(receipt)


@pytest.mark.parametrize(("at", "place"), [("inner", S(-3)), ("inner", S(2)), ("", S(-1)), ("", S(0))])
def test_a_boundary_split_on_a_dim_that_its_tensor_does_not_have(at, place):
    # A negative one past the front was taken for another dim, or crashed.
    with pytest.raises(mp.PlanError) as refused:
        agrees(Squares(nn.Linear(4, 6)), {"x": (5, 4)}, {"tp": 2}, mp.Rule(at, output={"tp": place}))
    assert refused.value.code == "dim-out-of-range"


class Summands(nn.Module):
    """Uses a partial sum as it is, hands it to a module that wants shards, and adds it to that module's result."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.w = nn.Linear(8, 6, bias=False), nn.Parameter(torch.randn(6, 5))
        self.mix = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        v = self.made(x)
        return torch.matmul(v, self.w).square().mean() + (v + self.mix(v)).square().mean()


def test_a_redistribution_that_was_done_for_another_module_is_not_done_again_where_the_tensor_was_made():
    rules = [
        mp.Rule("made", params={"weight": {"tp": S(1)}}, output={"tp": mp.P}),
        mp.Rule("mix", input={"input": {"tp": S(0)}}),
    ]
    agrees(Summands(), {"x": (3, 4, 8)}, {"tp": 2}, *rules, place={"tp": S(2)})


class Chunks(nn.Module):
    """A gathered sequence of which the last rank's part is empty: its view shares the memory that others copy."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6, bias=False), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).square().mean()


def test_a_rank_that_would_take_part_in_other_collectives_refuses_before_it_runs():
    # Simulated and real ranks say the same: the last one kept what the others gather again.
    rules = [mp.Rule("b", params={"weight": {"tp": S(1)}}), mp.Rule("", input={"x": {"tp": S(0)}})]
    try:
        kept = mp.Recompute(units=[""], policy="none", gather="regather")
        agrees(Chunks(), {"x": (2, 8)}, {"tp": 4}, *rules, recompute=kept)
    except mp.PlanError as refused:
        assert refused.code == "ranks-differ"


class Scaled(nn.Module):
    """Makes a constant as long as its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.zeros(x.shape[0], 1, dtype=x.dtype).add(0.5)


@pytest.mark.parametrize("rows", [2, 6])
def test_a_constant_as_long_as_a_shard_that_is_as_long_as_the_whole(rows):
    # One row of two on each of two ranks, again over two: rank 0 cannot tell its part from the data rank's.
    try:
        agrees(Squares(Scaled()), {"x": (rows, 6)}, {"dp_shard": 2, "tp": 2}, mp.Rule("inner", input={"x": {"tp": S(0)}}))
    except mp.PlanError as refused:
        assert refused.code == "ranks-differ" and rows == 2


class Both(nn.Module):
    """Uses what it is handed as shards, and then whole."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum() + x.cumsum(0).mean() + x.sort(0).values.cumsum(0).mean()


class GatheredBefore(nn.Module):
    """Gathers a tensor for itself and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.both = nn.Linear(5, 6), Both()

    def forward(self, x: Tensor) -> Tensor:
        v = self.made(x)
        return self.both(v) + v.cumsum(0).tanh().mean() if x.dim() > 2 else v.cumsum(0).tanh().mean() + self.both(v)


@pytest.mark.parametrize("shape", [(4, 5), (4, 3, 5)])
def test_a_module_that_uses_shards_and_then_what_another_gathered(shape):
    # The gathered tensor was recorded at the module's entry, twice, although the first use had seen a shard.
    agrees(GatheredBefore(), {"x": shape}, {"dp_shard": 2})


class Twice(nn.Module):
    """Calls one norm on what it is handed and on the result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x))


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.LayerNorm(12), Twice()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(self.first(x)))


def test_calls_that_are_handed_shards_of_other_parts_are_not_alike():
    cut = mp.Rule("inner.norm", params={"bias": {"tp": S(0, [4, 4, 4])}})
    agrees(Norms(), {"x": (3, 12)}, {"tp": 4}, mp.Rule("first", params={"bias": {"tp": S(0)}}), cut)


def test_classes_that_only_the_call_counts_are_checked_by_value_too():
    class Hot(nn.Module):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return x * F.one_hot(ids % 4, 4).double()

    given = {"x": mp.Input((6, 7, 4), torch.float64, {"dp": S(0)}), "ids": mp.Input((6, 7), torch.int64, {"dp": S(0)})}
    mp.lower(Hot(), mp.Plan(mesh={"dp_shard": 2}, inputs=given), 2)


def test_parts_that_two_axes_cut_in_turn():
    class Twofold(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x.tanh()], 0).square().sum()

    agrees(Squares(Twofold()), {"x": (8, 3)}, {"dp_replicate": 2, "dp_shard": 2})


class AsHanded(nn.Module):
    """A call that returns the tensor it was given, of which there are other uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.atleast_3d(h)).square().mean() + h.cumsum(-1).tanh().mean()


def test_the_gradient_of_a_tensor_that_a_call_returned_as_it_was_handed():
    rules = [mp.Rule("a", params={"weight": {"tp": S(0)}}), mp.Rule("b", params={"weight": {"tp": S(1)}})]
    agrees(AsHanded(), {"x": (2, 3, 6)}, {"tp": 2}, *rules)


def test_shards_of_fused_parts_one_after_the_other():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            return torch.cat([h, h.tanh()], -1).cumsum(0)

    cut = {"weight": {"tp": S(0, [4, 4])}, "bias": {"tp": S(0, [4, 4])}}
    agrees(Squares(Pair()), {"x": (3, 6)}, {"tp": 2}, mp.Rule("inner.up", params=cut), mp.Rule("inner", output={"tp": R}))
    low = mp.lower(Squares(Pair()), mp.Plan(
        mesh={"tp": 2}, inputs={"x": mp.Input((3, 6))}, rules=[mp.Rule("inner.up", params=cut)]
    ), 2)  # fmt: skip
    assert not [d for d in low.core.program.decided if d.call.name == "cat" and d.outs == ((R,),)]
