"""How many of transformers' causal language models does `mp.auto_plan` shard exactly? One tiny model of every class."""
