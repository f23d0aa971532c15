"""How many of transformers' causal language models does `mp.auto_plan` shard exactly? One tiny model of every class.

python -m benchmarks.hf_coverage --jobs 2              # everything; goes on where it was stopped
python -m benchmarks.hf_coverage --only llama,mamba    # these model types, afresh
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from benchmarks.hf_coverage.case import COMPOSITIONS
from benchmarks.hf_coverage.run import PEER, Cache, run_all, work
from benchmarks.hf_coverage.table import page
from benchmarks.hf_coverage.tiny import model_types


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="model types, with commas between")
    parser.add_argument("--compositions", default=",".join([*COMPOSITIONS, PEER]), help="of these, with commas between")
    parser.add_argument("--ranks", action="store_true", help="compare on gloo ranks also where simulated ranks agreed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path("out/hf_coverage.jsonl"))
    parser.add_argument("--page", type=Path, help="write the table here, as Markdown")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    given = parser.parse_args()
    only = [name for name in given.only.split(",") if name]
    compositions = given.compositions.split(",")
    cache = Cache(given.cache)
    cases = [(name, composition) for composition in compositions for name in only or model_types()]
    if only:
        for case in cases:
            cache.found.pop(case, None)
    run_all(cases, partial(work, ranks=given.ranks), cache, given.jobs)
    found = [cache.found[case] for case in cases]
    if given.page is not None:
        given.page.write_text(page(list(cache.found.values())))
    print(json.dumps(found, indent=1) if given.json else page(found))


if __name__ == "__main__":
    main()
