"""Clipping across meshes: the norm of the logical gradients, each element once, the same on every rank."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshplan.errors import PlanError
from meshplan.runtime.clip import clip_grad_norm_
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.ownership import Ownership, declare
from meshplan.runtime.recorder import record_collectives

EXACT = {"rtol": 1e-14, "atol": 0}


def with_grad(grad: Tensor) -> nn.Parameter:
    """A parameter of the layout of `grad`, which is its gradient."""
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    return parameter


def sharded(full: Tensor, mesh: DeviceMesh, *placements: object) -> DTensor:
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def local(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def logical_gradients() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(4, 4), (7, 5), (3,), (1, 6), (5, 2), (8, 3), (3, 5), (6,)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


# ---- on ranks ----------------------------------------------------------------------------------------------------


def _mixed(order: float, foreach: bool | None) -> dict[str, object]:
    """One parameter of each kind on dp 2 x tp 2; what came out, and what it cost."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, both, tp, empty, sub, strided, partial, flat = logical_gradients()
    rows = strided.view(2, 2, 2, 3)  # (tp, dp, row): tp cut first, then dp within it
    dp_rank, tp_rank = mesh.get_coordinate()
    flat_mesh = mesh._flatten("everyone")
    parameters = [
        with_grad(plain.clone()),
        with_grad(sharded(both, mesh, Shard(0), Shard(1))),
        with_grad(sharded(tp, mesh, Replicate(), Shard(0))),
        with_grad(sharded(empty, mesh["dp"], Shard(0))),  # one row: the second shard is empty
        with_grad(sharded(sub, mesh["tp"], Shard(1))),
        with_grad(
            DTensor.from_local(rows[tp_rank, dp_rank].clone(), mesh, [_StridedShard(0, split_factor=2), Shard(0)])
        ),
        with_grad(DTensor.from_local(partial * (dp_rank - 0.25) * 2, mesh, [Partial(), Replicate()])),
        with_grad(sharded(flat, flat_mesh, Shard(0))),
        nn.Parameter(torch.ones(3)),  # no gradient
    ]
    before = [local(p).clone() for p in parameters[:-1]]
    with record_collectives() as log:
        norm = clip_grad_norm_((p for p in parameters), 0.5, order, foreach=foreach)
    factors = [local(p) / b for p, b in zip(parameters[:-1], before, strict=True)]
    sent = [(c.op, c.elements) for c in log]
    return {"norm": norm, "factors": factors, "sent": sent}


@pytest.mark.parametrize(("order", "foreach"), [(2.0, None), (1.0, True), (3.5, False), (math.inf, None)])
def test_each_element_counts_once_whatever_its_mesh_and_layout(pool, order, foreach):
    full = torch.cat([g.flatten() for g in logical_gradients()])
    expected = torch.linalg.vector_norm(full, order)
    ranks = pool.run(_mixed, order, foreach)
    for rank in ranks:
        assert rank["norm"].shape == ()
        assert rank["norm"].dtype == torch.float64
        assert rank["norm"] == ranks[0]["norm"]  # to the bit
        torch.testing.assert_close(rank["norm"], expected, **EXACT)
        for factor in rank["factors"]:
            torch.testing.assert_close(factor, torch.full_like(factor, 0.5 / (expected.item() + 1e-6)), **EXACT)
        # The partial gradient's sum (15 elements), then one short vector a group: {dp,tp} and {dp} on dp; {dp,tp} and
        # {tp} on tp; {everyone}.
        assert rank["sent"] == [("all_reduce", 15), ("all_reduce", 2), ("all_reduce", 2), ("all_reduce", 1)]


def _field_case() -> tuple[float, list[float]]:
    tp, ep = (init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("tp", "ep"))
    parameters = [
        with_grad(sharded(torch.ones(2, 2), tp, Replicate())),
        with_grad(sharded(torch.ones(2, 4), ep, Shard(0))),
        with_grad(sharded(torch.ones(4), tp, Shard(0))),
    ]
    norm = clip_grad_norm_(iter(parameters), 1.0)
    return norm.item(), [x for p in parameters for x in local(p).unique().tolist()]


def test_replicated_expert_and_head_split_gradients_give_norm_4_and_factor_a_quarter(pool):
    for norm, grads in pool.run(_field_case, world=2):
        assert norm == 4.0  # not sqrt(20), not sqrt(12)
        assert grads == pytest.approx([0.25] * 3, rel=1e-6)


def _pipeline(declared: bool) -> tuple[float, list[float]]:
    """Stage norms 3 and 4, on pp 2 x tp 2; a weight tied between the stages is counted on the first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage, tp = mesh["tp"], mesh.get_coordinate()[1]
    pp = mesh.get_coordinate()[0]
    pp_group = AxisGroup("pp", 2, pp, mesh.get_group("pp").group_name)
    tp_group = AxisGroup("tp", 2, tp, mesh.get_group("tp").group_name)
    # Squares: 9 = 1 (tied) + 8 (split) on stage 0, 16 = 16 (split) on stage 1, whose tied copy is not counted.
    body = torch.full((8,), (1.0, 2**0.5)[pp], dtype=torch.float64)
    tied = torch.ones((), dtype=torch.float64)
    if declared:
        split = with_grad(body[4 * tp : 4 * tp + 4].clone())
        declare(split, Ownership(split=(tp_group,), stages=pp_group, device_type="cpu"))
    else:
        split = with_grad(sharded(body, stage, Shard(0)))
    shared = with_grad(tied.clone())
    declare(shared, Ownership(stages=pp_group, counted=pp == 0, device_type="cpu"))
    norm = clip_grad_norm_([split, shared], 1.0)
    return norm.item(), [local(split)[0].item() / body[0].item(), shared.grad.item()]


@pytest.mark.parametrize("declared", [False, True], ids=["from the mesh", "declared"])
def test_pipeline_stages_of_norm_3_and_4_are_clipped_by_one_fifth(pool, declared):
    for norm, factors in pool.run(_pipeline, declared):
        assert norm == pytest.approx(5.0, rel=1e-15)
        assert factors == pytest.approx([0.2, 0.2], rel=1e-6)


def _missing() -> tuple[float, float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    first, second = (with_grad(sharded(torch.full((2,), 3.0), mesh, Shard(0))) for _ in range(2))
    if dist.get_rank() == 1:
        first.grad = None  # an expert without tokens on this rank: the other one's collectives must still find a mate
        second.grad = None
    norm = clip_grad_norm_([first, second], 100.0).item()
    first.grad = second.grad = None
    return norm, clip_grad_norm_([first, second], 1.0).item()


def test_gradients_missing_on_one_rank_count_nothing_and_hang_nobody(pool):
    for norm, none in pool.run(_missing, world=2):
        assert norm == pytest.approx(math.sqrt(18), rel=1e-7)
        assert none == 0.0


def _fully_sharded() -> tuple[float, float, list[float], list[float]]:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp_shard",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1)).double()  # 7 rows as 3, 3, 1; one row as 1, 0, 0
    reference = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1)).double()
    reference.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh)
    x = torch.arange(10, dtype=torch.float64).view(2, 5)
    model(x).sum().backward()
    reference(x).sum().backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    ours = [p.grad.full_tensor().flatten() for p in model.parameters()]
    theirs = [p.grad.flatten() for p in reference.parameters()]
    return norm.item(), expected.item(), torch.cat(ours).tolist(), torch.cat(theirs).tolist()


def test_fully_sharded_gradients_with_uneven_and_empty_shards(pool):
    for norm, expected, ours, theirs in pool.run(_fully_sharded, world=3):
        assert norm == pytest.approx(expected, rel=1e-14)
        assert ours == pytest.approx(theirs, rel=1e-13)


def _refused() -> list[str]:
    codes = []
    everyone = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    elsewhere = DeviceMesh("cpu", [1 - dist.get_rank()], _init_backend=False)
    averaged = DTensor.from_local(torch.ones(2), everyone, [Partial("max")])
    foreign = DTensor.from_local(torch.ones(2), elsewhere, [Replicate()])
    for grad in (averaged, foreign):
        try:
            clip_grad_norm_([with_grad(grad)], 1.0)
        except PlanError as error:
            codes.append(error.code)
    return codes


def test_layouts_whose_norm_cannot_be_known_are_refused(pool):
    assert pool.run(_refused, world=2) == [["partial-gradient", "rank-outside-mesh"]] * 2


# ---- plain tensors, one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, math.inf])
def test_plain_tensors_are_clipped_as_torch_clips_them(order):
    ours, theirs = ([with_grad(g.clone()) for g in logical_gradients()] for _ in range(2))
    norm = clip_grad_norm_(ours, 0.7, order)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.7, order), rtol=1e-15, atol=0)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-15, atol=0)


def test_gradients_below_the_limit_are_left_alone():
    parameter = with_grad(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(parameter, 6.0).item() == 5.0  # a single tensor is legal, as in torch
    assert parameter.grad.tolist() == [3.0, 4.0]


def test_a_parameter_given_twice_counts_once():
    parameter = with_grad(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_([parameter, parameter], 2.5).item() == 5.0
    assert parameter.grad.tolist() == pytest.approx([1.5, 2.0], rel=1e-6)


def test_no_parameters_and_no_gradients_have_norm_zero():
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0


def test_half_precision_norms_are_accumulated_in_float32():
    parameters = [with_grad(torch.full((1001,), 0.1, dtype=torch.bfloat16)) for _ in range(3)]
    norm = clip_grad_norm_(parameters, 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(math.sqrt(3003) * torch.tensor(0.1).bfloat16().item(), rel=1e-6)
    assert parameters[0].grad.dtype == torch.bfloat16


def test_a_sum_of_squares_beyond_float32_is_still_a_finite_norm():
    parameters = [with_grad(torch.tensor([1.5e19])) for _ in range(2)]  # 2.25e38 each; float32 ends at 3.4e38
    assert clip_grad_norm_(parameters, 1.0).item() == pytest.approx(1.5e19 * math.sqrt(2), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_norm_raises_if_asked_and_leaves_the_gradients(bad):
    parameter = with_grad(torch.tensor([1.0, bad]))
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
    assert parameter.grad[0] == 1.0
    assert not clip_grad_norm_([parameter], 1.0).isfinite()


@pytest.mark.parametrize("order", [0.0, -1.0, -math.inf, math.nan])
def test_an_order_that_is_no_norm_is_refused(order):
    with pytest.raises(PlanError) as refusal:
        clip_grad_norm_([with_grad(torch.ones(2))], 1.0, order)
    assert refusal.value.code == "norm-type"


def test_sparse_gradients_are_refused():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2).to_sparse()
    with pytest.raises(PlanError) as refusal:
        clip_grad_norm_([parameter], 1.0)
    assert refusal.value.code == "sparse-gradient"
