"""Privacy: events, the mechanism that adds noise, accounting, plans, ledgers and statements."""
