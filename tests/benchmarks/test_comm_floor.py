"""The lowered Llama moves what the formulas say, and no byte more than the hand-written peer."""

from benchmarks.comm_floor import COMPOSITIONS, CONFIG, Composition, Sizes, measure


def test_sizes_of_a_rank_are_those_worked_out_by_hand():
    sizes = Sizes.of(CONFIG, {"dp_shard": 2, "tp": 2})
    # 8 x 24 tokens over 2 data ranks, 64 wide; q and o are 64 x 64, k and v 64 x 32, three matrices of 64 x 96.
    block = (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) // 2 + 2 * 64
    assert sizes == Sizes(L=3, A=96 * 64 * 4, T=96 * 4, N=64 * 4, B=3 * block * 4, W=(2 * 128 * 64 // 2 + 64) * 4, n=2)


def test_bytes_are_at_the_floor_and_at_most_the_peers(pool):
    chosen = tuple(c for c in COMPOSITIONS if c.plan in ("ddp", "tp_sp_fsdp"))
    report = measure(pool, chosen)
    by_plan = {row["plan"]: row for row in report.rows}
    # Every parameter once, in float32, and the count of labels.
    block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 128
    assert by_plan["ddp"]["recorded"] == 4 * (3 * block + 2 * 128 * 64 + 64) + 8
    for row in report.rows:
        assert row["counted"] == row["formula"] == row["recorded"] <= row["peer recorded"]


def test_a_row_off_the_floor_says_so(pool):
    short = Composition("ddp", {"dp_replicate": 4}, "B + W", lambda s: s.B + s.W, "without the count of labels")
    report = measure(pool, (short,))
    assert report.rows[0]["at the floor"] is False
    assert report.facts["all at the floor"] is False
