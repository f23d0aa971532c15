"""How tp splits each block of a pattern: by heads, by groups, by channels."""

import meshplan as mp

VECTORS = {name: {"tp": mp.S(0)} for name in ("dt_bias", "log_rate", "skip", "norm_weight")}
CONVOLUTION = {"weight": {"tp": mp.S(1)}, "bias": {"tp": mp.S(0)}}
ROWS = {"tp": mp.R}
TP = {
    "A": [
        mp.Rule("layers.*.attention.{wq,wk,wv}", use="colwise"),
        mp.Rule("layers.*.attention.wo", use="rowwise", output=ROWS),
    ],
    "M": [
        mp.Rule("layers.*.state_space.{w_gate,w_x,w_b,w_c,w_dt}", use="colwise"),
        mp.Rule("layers.*.state_space.{conv_x,conv_b,conv_c}", params=CONVOLUTION),
        mp.Rule("layers.*.state_space", params=VECTORS),
        mp.Rule("layers.*.state_space.w_out", use="rowwise", output=ROWS),
    ],
    "R": [
        mp.Rule("layers.*.recurrent.{w_gate,w_x}", use="colwise"),
        mp.Rule("layers.*.recurrent.conv", params=CONVOLUTION),
        mp.Rule("layers.*.recurrent.recurrence", params={"rate": {"tp": mp.S(0)}}),
        mp.Rule("layers.*.recurrent.recurrence.*", params={"weight": {"tp": mp.S(0)}, "bias": {"tp": mp.S(0)}}),
        mp.Rule("layers.*.recurrent.w_out", use="rowwise", output=ROWS),
    ],
}
"""Rules of each letter but E."""
