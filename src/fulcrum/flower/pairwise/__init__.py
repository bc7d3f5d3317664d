"""Masked sums across machines (docs/pairwise.md): the parties' keys, the manifest of a round, both sides' steps.

keys.py         a party's X25519 key of one run, signed with its registered key; what two parties derive from theirs
manifest.py     what every participant of a round must agree on, its digest, and a party's checks of it
pins.py         the other parties' fingerprints in a party's terms
party.py        at a party: compute, report ready, check the manifest, pay, mask, send
model_digest.py what all participants have computed at
coordinator.py  relay: ask who is ready, fix the set, collect all messages or none

keys.py and manifest.py are values and functions without network or clock: tests play a malicious server with them.
"""
