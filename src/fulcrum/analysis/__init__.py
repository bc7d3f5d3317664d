"""What can be said about a method or a run beside training it: the paper's theory, checked (`theory/`)."""
