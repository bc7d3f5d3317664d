"""Detectors: bugs in privacy code, found from outside.

suite.py           every detector on one case, blind to what is wrong with it
audit.py           canaries, and a lower bound on epsilon
probe.py, server_probe.py           what parties (a trusted server) release of records that were made for it
noise.py, contributions.py, hostile.py, messages.py   neighbour replay: noise, records, hostile ones, masks, scores
executed.py, ledger.py, statement.py  a whole run; its ledger and its statement computed again
exact.py, second_opinion.py         tests with known false-alarm rates; an accountant of their own
findings.py        readings, alarms and the level over all of them
planted.py, cases.py                bugs to be found, and cases on which nothing may be
foreign/           `fulcrum check`: the same on other people's clients
"""
