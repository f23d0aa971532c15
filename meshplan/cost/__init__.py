"""What a lowered program costs: work of single calls and time of collectives on a machine (modelled, never measured)."""
