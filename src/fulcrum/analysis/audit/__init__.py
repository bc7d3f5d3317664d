"""The audit: lower bounds on epsilon, measured on the releases of a run (docs/audit.md)."""
