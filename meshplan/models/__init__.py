"""Small plain single-device models, text to train them on, and the names `--model` knows: no parallelism in here."""
