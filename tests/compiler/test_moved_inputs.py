"""A tensor that nested modules take: what the outer one moves at its entry is what the inner one is handed."""

import torch
from torch import Tensor, nn

import meshplan as mp
from meshplan.verify.aligned import align


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q, self.k = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + self.q(self.norm(x)) * self.k(other).mean(1, keepdim=True)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross = Cross()

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + self.cross(x, other)


class Model(nn.Module):
    """One embedding that the encoder reads as its other input, and the decoder as its own in two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.encoder, self.decoder = Cross(), Decoder()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        encoded = self.encoder(x[:, :2], x)
        return (self.decoder(x, encoded) ** 2).mean()


def test_each_module_is_handed_what_the_outer_one_made_of_it():
    S = mp.S
    rules = [
        mp.Rule("words", params={"weight": {"tp": S(1)}}),
        mp.Rule("encoder", input={"other": {"tp": S(1)}}),
        mp.Rule("{encoder,decoder.cross}.{q,k}", use="colwise", output={"tp": S(1)}),
    ]
    plan = mp.Plan(mesh={"tp": 2}, inputs={"ids": mp.Input(shape=(3, 6), dtype=torch.int64)}, rules=rules)
    assert align(Model().double(), plan, 2).distance < 1e-9
