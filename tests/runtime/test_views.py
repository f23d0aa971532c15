"""A parameter seen as its local shard: gradients reach `p.grad` by the short way, or by autograd's where one watches."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshplan.errors import PlanError
from meshplan.runtime.views import Step, local_view, lowered_class


def parameter() -> nn.Parameter:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    local = torch.tensor([[1.0, -2.0, 3.0]], dtype=torch.float64)
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))


def _accumulated() -> tuple[type, Tensor, Tensor]:
    p = parameter()
    (local_view(p, ()) * torch.tensor([2.0, 3.0, 5.0])).sum().backward()
    first = p.grad.to_local().clone()
    (local_view(p, ()) ** 2).sum().backward()
    return type(p.grad), first, p.grad.to_local()


def test_gradients_become_dtensors_and_add_up(pool):
    kind, first, both = pool.run(_accumulated, world=1)[0]
    assert kind is DTensor
    assert first.tolist() == [[2.0, 3.0, 5.0]]
    assert both.tolist() == [[2.0 + 2 * 1, 3.0 - 2 * 2, 5.0 + 2 * 3]]


def _used_twice() -> Tensor:
    p = parameter()
    (local_view(p, ()).square().sum() + 3 * local_view(p, ()).sum()).backward()
    return p.grad.to_local()


def test_two_uses_in_one_forward_add_up(pool):
    assert pool.run(_used_twice, world=1)[0].tolist() == [[5.0, -1.0, 9.0]]


def _hooks() -> tuple[list[list[float]], list[list[float]], Tensor]:
    seen: list[list[float]] = []
    after: list[list[float]] = []
    p, q = parameter(), parameter()
    p.register_hook(lambda g: (seen.append(g.to_local()[0].tolist()), g * 10)[1])
    q.register_post_accumulate_grad_hook(lambda q: after.append(q.grad.to_local()[0].tolist()))
    (local_view(p, ()).sum() + local_view(q, ()).sum() * 7).backward()
    return seen, after, p.grad.to_local()


def test_hooks_of_a_parameter_fire_with_its_gradient(pool):
    seen, after, grad = pool.run(_hooks, world=1)[0]
    assert seen == [[1.0, 1.0, 1.0]]
    assert after == [[7.0, 7.0, 7.0]]
    assert grad.tolist() == [[10.0, 10.0, 10.0]]


def _asked_for() -> tuple[Tensor, bool, Tensor, bool]:
    p, q = parameter(), parameter()
    (got,) = torch.autograd.grad((local_view(p, ()) * local_view(q, ()).detach()).sum(), [p])
    clean = p.grad is None
    (local_view(p, ()) * local_view(q, ())).sum().backward(inputs=[q])
    return got.to_local(), clean, q.grad.to_local(), p.grad is None


def test_autograd_grad_returns_the_gradient_and_leaves_grad_alone(pool):
    got, clean, only, untouched = pool.run(_asked_for, world=1)[0]
    assert got.tolist() == only.tolist() == [[1.0, -2.0, 3.0]]
    assert clean and untouched


def _second_derivative() -> None:
    p = parameter()
    torch.autograd.grad(local_view(p, ()).pow(3).sum(), [p], create_graph=True)


def test_a_second_derivative_is_refused(pool):
    with pytest.raises(PlanError) as refused:
        pool.run(_second_derivative, world=1)
    assert refused.value.code == "second-derivative"


def _inside_and_outside() -> tuple[type, type, list[str], str]:
    module = nn.Linear(3, 1, bias=False)
    module.weight = parameter()
    module.__dict__["_meshplan_views"] = {"weight": ()}
    module.__class__ = lowered_class(nn.Linear, ("weight",))
    outside = type(module.weight)
    Step.depth += 1
    inside = type(module.weight)
    Step.depth -= 1
    return outside, inside, list(module.state_dict()), type(module).__name__


def test_only_inside_a_step_is_the_parameter_its_local_shard(pool):
    outside, inside, names, called = pool.run(_inside_and_outside, world=1)[0]
    assert outside is DTensor and inside is Tensor
    assert names == ["weight"] and called == "Linear"
