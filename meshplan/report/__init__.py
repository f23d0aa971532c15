"""What a lowered program communicates, for people: text, HTML, a trace, pseudo-code, and the difference of two."""
