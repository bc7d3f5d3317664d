"""Training: what a client does in a round, what the server does, and the loop over rounds."""
