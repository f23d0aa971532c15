"""What a user writes: placements, rules, YAML with line numbers, path patterns, shorthands."""
