"""What models are made of, a few lines each: projections, gated and fused ones, attention, convolutions, norms, tables."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.fuzz.scope import Scope

WIDTHS = (2, 3, 4, 5, 6, 8, 12)


def linear(s: Scope, x: str, width: int | None = None, bias: bool | None = None) -> str | None:
    """`nn.Linear`, or the same product written with a bare parameter, on the last dim of `x`."""
    inside, out = s.shape(x)[-1], width or s.pick(WIDTHS)
    if s.chance(0.75):
        with_bias = s.chance(0.6) if bias is None else bias
        made = s.member(f"nn.Linear({inside}, {out}{'' if with_bias else ', bias=False'})")
        return s.let(f"{made}({x})")
    w = s.member(f"nn.Parameter(torch.randn({inside}, {out}))")
    forms = [
        f"{x} @ {w}",
        f"torch.matmul({x}, {w})",
        f"F.linear({x}, {w}.t())",
        f"torch.einsum('...i,io->...o', {x}, {w})",
    ]
    if len(s.shape(x)) == 3:
        forms += [f"torch.einsum('bld,de->ble', {x}, {w})", f"torch.einsum('bld,de->bel', {x}, {w}).transpose(1, 2)"]
    if len(s.shape(x)) == 2:
        b = s.member(f"nn.Parameter(torch.randn({out}))")
        forms += [f"torch.addmm({b}, {x}, {w})", f"{x}.mm({w})"]
    return s.let(s.pick(forms))


def mlp(s: Scope) -> None:
    """Two projections, perhaps gated, perhaps residual."""
    x = s.current
    width = s.shape(x)[-1]
    up = linear(s, x, s.pick((4, 6, 8, 12)))
    if up is None:
        return
    up = s.let(s.pick([f"F.relu({up})", f"F.gelu({up})", f"torch.tanh({up})"]))
    if s.chance(0.3) and up:
        gate = linear(s, x, s.shape(up)[-1])
        up = s.let(f"{up} * F.silu({gate})") if gate else up
    if up:
        residual(s, x, linear(s, up, width))


def residual(s: Scope, x: str, y: str | None) -> None:
    """Add `x` most of the time."""
    if y and s.shape(x) == s.shape(y) and s.chance(0.7):
        s.let(f"{x} + {y}")


def fused(s: Scope) -> None:
    """One projection cut into two or three, as gate|up and q|k|v are."""
    x = s.current
    parts, width = s.pick((2, 3)), s.pick((2, 4, 6))
    f = linear(s, x, parts * width)
    if f is None:
        return
    names = tuple(s.new() for _ in range(parts))
    nd = len(s.shape(f))
    cut = s.pick(
        [
            f"{f}.chunk({parts}, -1)",
            f"{f}.split({width}, -1)",
            f"{f}.split([{', '.join([str(width)] * parts)}], dim={nd - 1})",
            f"{f}.unflatten(-1, ({parts}, {width})).unbind(-2)",
            f"{f}.view(*{f}.shape[:-1], {parts}, {width}).unbind(-2)",
            f"torch.chunk({f}, {parts}, dim=-1)",
            f"{f}.tensor_split({parts}, -1)",
        ]
    )
    if s.line(f"{', '.join(names)} = {cut}", *names):
        a, b = names[0], names[-1]
        out = s.let(s.pick([f"F.silu({a}) * {b}", f"{a} + {b}", f"torch.cat([{b}, {a}], -1)", f"{a} * {b}.sigmoid()"]))
        if out and s.chance(0.6):
            residual(s, x, linear(s, out, s.shape(x)[-1]))


def attention(s: Scope) -> None:
    """Self-attention of a [batch, length, width] value: separate or fused projections, grouped heads, by hand or by torch."""
    x = s.current
    if len(s.shape(x)) != 3:
        return
    b, length, width = s.shape(x)
    heads, size = s.pick((2, 3, 4)), s.pick((2, 3))
    few = heads if s.chance(0.7) else s.pick([k for k in (1, 2, heads) if heads % k == 0])
    if few == heads and s.chance(0.3):
        f = linear(s, x, 3 * heads * size)
        names = tuple(s.new() for _ in range(3))
        if f is None or not s.line(f"{', '.join(names)} = {f}.chunk(3, dim=-1)", *names):
            return
        q, k, v = names
    else:
        made = [linear(s, x, n * size) for n in (heads, few, few)]
        if None in made:
            return
        q, k, v = made  # type: ignore[assignment]
    split: list[str] = []
    for name, n in ((q, heads), (k, few), (v, few)):
        form = s.pick(
            [
                f"{name}.view({x}.shape[0], {x}.shape[1], {n}, {size}).transpose(1, 2)",
                f"{name}.unflatten(-1, ({n}, -1)).transpose(1, 2)",
                f"{name}.view({x}.shape[0], {x}.shape[1], -1, {size}).transpose(1, 2)",
                f"{name}.reshape(*{name}.shape[:2], {n}, {size}).permute(0, 2, 1, 3)",
            ]
        )
        made_name = s.let(form)
        if made_name is None:
            return
        split.append(made_name)
    q, k, v = split
    if few < heads and s.chance(0.5):
        grouped = ", enable_gqa=True"
    else:
        grouped = ""
        if few < heads:
            k, v = (s.let(f"{t}.repeat_interleave({heads // few}, 1)") or t for t in (k, v))
    if grouped or s.chance(0.5):
        masks = [", is_causal=True", "", f", attn_mask=torch.ones({length}, {length}, dtype=torch.bool).tril()"]
        masks += [f", attn_mask={m}[:, None, None, :]" for m in s.args if str(s.env[m].dtype) == "torch.bool"]
        o = s.let(f"F.scaled_dot_product_attention({q}, {k}, {v}{s.pick(masks)}{grouped})")
    else:
        a = s.let(f"{q} @ {k}.transpose(-1, -2) * {size} ** -0.5")
        if a and s.chance(0.5):
            a = s.let(
                f"{a}.masked_fill(torch.ones({x}.shape[1], {x}.shape[1], dtype=torch.bool).triu(1), float('-inf'))"
                ".softmax(-1) + 0"
            )
        elif a:
            a = s.let(f"{a}.softmax(-1)")
        o = s.let(f"{a} @ {v}") if a else None
    if o is None:
        return
    rows = b if s.chance(0.1) else f"{x}.size(0)"  # a global size in the code
    o = s.let(
        s.pick(
            [
                f"{o}.transpose(1, 2).reshape({x}.shape[0], {x}.shape[1], -1)",
                f"{o}.transpose(1, 2).flatten(-2)",
                f"{o}.permute(0, 2, 1, 3).contiguous().view({rows}, {x}.size(1), {heads * size})",
            ]
        )
    )
    if o:
        residual(s, x, linear(s, o, width))


def norm(s: Scope) -> None:
    """A norm module over the last dims, or over groups of channels."""
    x = s.current
    shape = s.shape(x)
    made = [f"nn.LayerNorm({shape[-1]})", f"nn.RMSNorm({shape[-1]})", f"nn.LayerNorm({shape[-1]}, bias=False)"]
    made += [f"nn.LayerNorm([{shape[-2]}, {shape[-1]}])"] if len(shape) > 2 else []
    made += [f"nn.GroupNorm(1, {shape[1]})", f"nn.BatchNorm1d({shape[1]}).eval()"] if len(shape) == 3 else []
    if shape[-1] > 1:
        s.let(f"{s.member(s.pick(made))}({x})")


def hand_norm(s: Scope) -> None:
    """An RMS norm or layer norm by hand, with a parameter, over any dim."""
    x = s.current
    d, shape = s.dim(x), s.shape(x)
    own = [1] * len(shape)
    own[d] = shape[d]
    w = s.member(f"nn.Parameter(torch.ones({', '.join(map(str, own))}))")
    s.let(
        s.pick(
            [
                f"{x} * torch.rsqrt({x}.pow(2).mean({d}, keepdim=True) + 0.1) * {w}",
                f"({x} - {x}.mean({d}, keepdim=True)) / torch.sqrt({x}.var({d}, keepdim=True, unbiased=False) + 0.1) * {w}",
                f"{w} * {x} / ({x}.norm(2, dim={d}, keepdim=True) + 1)",
                f"F.softmax({x} * {w}, dim={d})",
            ]
        )
    )


def convolution(s: Scope) -> None:
    """A convolution over the last dim or two, sometimes depthwise, sometimes causal."""
    x = s.current
    shape = s.shape(x)
    if len(shape) not in (3, 4):
        return
    channels, n = shape[1], len(shape) - 2
    forms = [
        f"nn.Conv{n}d({channels}, {s.pick((2, 3, 4, 6))}, 1)",
        f"nn.Conv{n}d({channels}, {channels}, 3, padding=1, groups={channels})",
    ]
    forms += [f"nn.Conv{n}d({channels}, {s.pick((2, 4))}, 3, padding=1, bias=False)"]
    if n == 1 and s.chance(0.5):
        last = shape[-1]
        kind = s.pick([f"{last}, {last}, 2, groups={last}", f"{last}, {s.pick((2, 4, last))}, 2"])
        made = s.member(f"nn.Conv1d({kind})")
        s.let(f"{made}(F.pad({x}.transpose(1, 2), (1, 0))).transpose(1, 2)")
        return
    y = s.let(f"{s.member(s.pick(forms))}({x})")
    if y and s.chance(0.3):
        s.let(f"F.{s.pick(('avg', 'max'))}_pool{n}d({y}, 2)")


def table(s: Scope) -> None:
    """A look-up of an integer input, added to or put beside what there is."""
    ints = [n for n in s.args if not s.env[n].is_floating_point() and s.env[n].dtype.is_signed]
    if not ints:
        return
    i, x = s.pick(ints), s.current
    width = s.shape(x)[-1]
    form = s.pick(["module", "parameter", "positions"])
    if form == "positions" and len(s.shape(x)) == 3:
        made = s.member(f"nn.Embedding({s.shape(x)[1] + 2}, {width})")
        s.let(f"{x} + {made}(torch.arange({x}.shape[1]))")
    elif form == "module":
        made = s.member(f"nn.Embedding({s.pick((5, 7, 8))}, {width})")
        s.let(f"{x} + {made}({i} % {made}.num_embeddings)")
    else:
        w = s.member(f"nn.Parameter(torch.randn(6, {width}))")
        s.let(
            f"{x} + "
            + s.pick(
                [
                    f"{w}[{i} % 6]",
                    f"F.embedding({i} % 6, {w})",
                    f"{w}.index_select(0, ({i} % 6).flatten()).view(*{i}.shape, -1)",
                ]
            )
        )


def products(s: Scope) -> None:
    """Einsums and batched products of values with each other."""
    x = s.current
    if len(s.shape(x)) != 3:
        return
    y = s.pick([n for n in s.floats(3) if s.shape(n)[:2] == s.shape(x)[:2]])
    s.let(
        s.pick(
            [
                f"torch.einsum('bld,bme->blm', {x}, {x})",
                f"torch.einsum('bld,ble->bde', {x}, {y})",
                f"torch.einsum('bld,bmd->blm', {x}, {x}).softmax(-1) @ {y}",
                f"torch.bmm({x}.transpose(1, 2), {y})",
                f"torch.baddbmm({x} @ {x}.mT, {x}, {x}.mT)",
                f"torch.einsum('bld,bld->bl', {x}, {x}).unsqueeze(-1) * {y}",
                f"torch.einsum('bld->bd', {x})",
                f"torch.einsum('bld,ble->', {x}, {y}) + {x}",
                f"torch.tensordot({x}, {y}.transpose(0, 1), dims=([2], [2]))[:, :2, 0]",
            ]
        )
    )


def dropout(s: Scope) -> None:
    """Dropout, as a module or a function."""
    x = s.current
    if s.chance(0.5):
        s.let(f"{s.member('nn.Dropout(0.4)')}({x})")
    else:
        s.let(f"F.dropout({x}, 0.3, self.training)")


def again(s: Scope) -> None:
    """A member that was used before, used once more."""
    x = s.current
    fits = [
        f"self.{a}"
        for a, made in s.members
        if made.startswith((f"nn.Linear({s.shape(x)[-1]},", f"nn.LayerNorm({s.shape(x)[-1]}"))
    ]
    if fits:
        s.let(f"{s.pick(fits)}({x})")


IDIOMS: dict[Callable[[Scope], None], int] = {
    mlp: 4,
    fused: 3,
    attention: 4,
    norm: 3,
    hand_norm: 2,
    convolution: 2,
    table: 2,
    products: 2,
    dropout: 1,
    again: 1,
}


def any_idiom(s: Scope) -> None:
    """Write one drawn idiom; nothing where it does not fit what there is."""
    s.rng.choices(list(IDIOMS), list(IDIOMS.values()))[0](s)
