"""One script a question: `python -m benchmarks.<name> [--json]` from the repository root."""
