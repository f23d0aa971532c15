"""Faults that people who shard models met in practice: each kind is exact here, or refused before any collective."""
