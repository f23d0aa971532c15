"""Gathering again on real ranks: exact, in the predicted order, beside FSDP's own collectives."""

from dataclasses import replace

import meshplan as mp
from tests.lowering.region_models import llama, llama_plan


def test_a_llama_that_gathers_again_is_exact_and_sends_what_the_graph_says(pool):
    again = mp.Recompute(units=["layers.*"], policy="none", gather="regather")
    plan = llama_plan({"dp_shard": 2, "tp": 2}, fsdp={"units": ["layers.*"]}, recompute=again)
    mp.verify(llama, plan, nproc=4).raise_if_failed()
    saved = mp.lower(llama(), replace(plan, recompute=None), world_size=4)
    more = len(mp.lower(llama(), plan, world_size=4).collectives) - len(saved.collectives)
    assert more == 2
