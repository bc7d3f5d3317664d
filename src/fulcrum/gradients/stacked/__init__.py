"""Per-example gradients of many clients and runs in one tensor program, for GPUs."""
