"""What every sparse language model here has around its attention: embedding, blocks, head, and the losses of both."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshplan.models.llama import INIT_STD, FeedForward
from meshplan.models.moe import MoE
from meshplan.models.rotary import Rotary
from meshplan.models.router import Router, Routing
from meshplan.models.router_losses import RouterLosses, router_loss


class Block(nn.Module):
    """Pre-norm attention, then a dense feed-forward or a mixture of experts, each added to the residual stream.

    Arguments:
        dim, eps: width, and epsilon of the norms.
        attention: called with x, cosines and sines.
        feed_forward: a `FeedForward`, which becomes `feed_forward`, or a `MoE`, which becomes `moe`.
    """

    def __init__(self, dim: int, eps: float, attention: nn.Module, feed_forward: FeedForward | MoE) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(dim, eps=eps)
        self.moe = feed_forward if isinstance(feed_forward, MoE) else None
        self.feed_forward = None if isinstance(feed_forward, MoE) else feed_forward

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Routing | None]:
        """`[batch, seq, dim]` to the same, and what the block's router decided, if it has one."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.ffn_norm(x)
        if self.moe is not None:
            y, routing = self.moe(h)
            return x + y, routing
        assert self.feed_forward is not None
        return x + self.feed_forward(h), None


class Decoder(nn.Module):
    """A causal language model of blocks: logits, or with labels the loss, router losses included.

    Arguments:
        vocab_size, dim, eps: rows of the embedding and of the head, width, epsilon of the last norm.
        rotary: cosines and sines for all blocks.
        layers: called with x, cosines and sines; they return x and a `Routing` or None.
        losses, score: router losses to add, or None; and the score of the routers, as in `RouterConfig`.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        eps: float,
        rotary: Rotary,
        layers: Iterable[nn.Module],
        losses: RouterLosses | None = None,
        score: str = "softmax",
    ) -> None:
        super().__init__()
        self.losses, self.score = losses, score
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.rotary = rotary
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(dim, eps=eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module: normal weights, no biases. Modules with parameters of their own do it themselves."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits, or the loss.

        Arguments:
            tokens: int64 `[batch, seq]`.
            labels: int64 `[batch, seq]`, already aligned with the logits (no shift here); -100 is not counted.
            positions: int64 `[seq]` or `[batch, seq]`; None counts from 0.

        Returns:
            logits `[batch, seq, vocab]`; or with `labels` the 0-dim mean cross entropy over counted tokens, plus router
            losses over all tokens.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = self.rotary(positions)
        x, routings = self.tok_embeddings(tokens), []
        for layer in self.layers:
            x, routing = layer(x, cos, sin)
            if routing is not None:
                routings.append(routing)
        logits = self.output(self.norm(x))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        if self.losses is not None and routings:
            loss = loss + router_loss(routings, self.losses, self.score, batch=tokens.shape[0])
        return loss

    def update_biases(self, rate: float = 0.001) -> None:
        """`Router.update_bias` of every router that is balanced by a bias: once an optimizer step."""
        for module in self.modules():
            if isinstance(module, Router) and module.config.balance_bias:
                module.update_bias(rate)
