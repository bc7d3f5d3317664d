"""One self-contained page about runs, live or stored: what the folders hold, and nothing else."""
