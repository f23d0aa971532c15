"""Random models under random plans: each is exact or refused. `python -m benchmarks.fuzz --cases 1000 --seed 0`.

A case is data (`case`): a program written as lines of torch (`scope`, `ops`, `idioms`, `models`), and a plan (`plans`,
`spoil`). `oracle` judges it, `shrink` makes a wrong one short, and `case.script` prints it as a script of its own.
"""
