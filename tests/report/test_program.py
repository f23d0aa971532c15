"""The lowered program as pseudo-code."""

from meshplan.report.program import program_text
from tests.report.example import llama

BLOCK = """\
layers.1:
    parameters = all_gather(parameters, dp_shard)  # S -> R, 2.3 MiB | all_gather 2.3 MiB, reduce_scatter 2.3 MiB
    attention:
        x = all_gather(x, tp)                      # S(1) -> R, 4.0 MiB | reduce_scatter 4.0 MiB
        wo(weight: [256, 256] {dp_shard: S(0), tp: S(1)})
        out = reduce_scatter(out, tp)              # P -> S(1), 4.0 MiB | all_gather 4.0 MiB
    feed_forward:
        x = all_gather(x, tp)                      # S(1) -> R, 4.0 MiB | reduce_scatter 4.0 MiB
        w2()
        out = reduce_scatter(out, tp)              # P -> S(1), 4.0 MiB | all_gather 4.0 MiB
"""


def test_a_block_reads_as_plain_code():
    assert program_text(llama(), "layers.1") == BLOCK


def test_the_whole_model_shows_equal_layers_once_and_backward_only_lines():
    lines = [line.rsplit("  # ", 1)[0].strip() for line in program_text(llama(3)).splitlines()]
    assert lines[:4] == [
        "llama-tiny:",
        "tok_embeddings(weight: [250, 512] {dp_shard: S(0), tp: S(0)})",
        "out = reduce_scatter(out, tp)",
        "layers.[0-2] x3:",
    ]
    assert lines[-4:] == [
        "norm(weight: [256] {dp_shard: S(0), tp: R})",
        "# weight over tp, backward only",
        "x = all_gather(x, tp)",
        "output()",
    ]
