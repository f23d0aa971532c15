"""Models and plans for DTensor regions that ranks can import."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshplan as mp
from meshplan.models.llama import Llama, LlamaConfig


def llama() -> Llama:
    sizes = {"dim": 24, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 40, "vocab_size": 31}
    return Llama(LlamaConfig(**sizes, dropout=0.1))


def llama_plan(mesh: dict[str, int], **more) -> mp.Plan:
    split = {"tp": mp.S(1)}
    rules = [
        mp.Rule("tok_embeddings", use="embedding", output=split),
        mp.Rule("layers.*.{attention_norm,ffn_norm}", use="sequence"),
        mp.Rule("layers.*.attention.{wq,wk,wv}", use="colwise"),
        mp.Rule("layers.*.attention.wo", use="rowwise", output=split),
        mp.Rule("layers.*.feed_forward.{w1,w3}", use="colwise"),
        mp.Rule("layers.*.feed_forward.w2", use="rowwise", output=split),
        mp.Rule("norm", use="sequence"),
        mp.Rule("output", use="vocab_head"),
    ]
    inputs = {n: mp.Input(shape=(4, 6), dtype=torch.int64, place={"dp": mp.S(0)}) for n in ("tokens", "labels")}
    return mp.Plan(mesh=mesh, inputs=inputs, rules=rules, **more)


class DTensorIsWrongHere(nn.Module):
    """Calls for which DTensor's own rules give other numbers, without a word, on sharded values: cumulative sums over a
    negative dim, squared and smooth absolute errors, a mean over ignored labels. And a split fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(6, 12)
        self.down = nn.Linear(4, 6)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        a, b, c = self.fused(x).split([4, 4, 4], dim=-1)
        y = self.down(a.cumsum(dim=-1) * b.logcumsumexp(-2) + c)
        losses = F.mse_loss(y, x) + F.smooth_l1_loss(y, 2 * x) + y.std(dim=0).mean() + y.amax()
        return losses + F.cross_entropy(y, labels)


def wrong_plan(mesh: dict[str, int]) -> mp.Plan:
    rules = [mp.Rule("fused", use="colwise"), mp.Rule("down", use="colwise")]
    inputs = {
        "x": mp.Input(shape=(8, 6), dtype=torch.float32, place={"dp": mp.S(0)}),
        "labels": mp.Input(shape=(8,), dtype=torch.int64, place={"dp": mp.S(0)}),
    }
    return mp.Plan(mesh=mesh, inputs=inputs, rules=rules if mesh.get("tp", 1) > 1 else [], regions="dtensor")


class WritesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor
        self.register_buffer("total", torch.zeros(6))
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.total.add_(y.detach().sum(0))
        return y


class DrawsNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return y + torch.randn_like(y)
