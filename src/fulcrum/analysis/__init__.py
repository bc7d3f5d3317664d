"""What people look at beside training: a run's page (`report/`), and the theory, checked (`theory/`)."""
