"""The command line: one command a file, registered in `main`."""
