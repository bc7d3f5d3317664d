"""Pairwise masks: the server sees the parties' sum, and the parties share one dose of noise (docs/pairwise.md).

shares.py    how much noise each party adds itself, for c colluders and unequal weights, rates, C and budgets
graph.py     which pairs of parties have a mask: all, or few that stay connected without any c of them
integers.py  the grid, a party's integers, masks modulo 2^32, their sum
persons.py   what a person with records at two parties can lose
"""
