"""The same federation across machines, on Flower (`pip install 'fulcrum-fl[flower]'`); only this folder imports flwr.

messages.py         what travels: a header and arrays, checked before use; nothing is unpickled
keys.py             a party's key pair: it signs every reply; the register of public keys, read again when it changes
signing.py          signatures with a purpose; the coordinator signs every request
request_gate.py     a party's gate: only the coordinator's signed requests for this party pass
display.py          received text, made fit to be shown
units.py            how many units a party may say it has
known_ledgers.py    which ledger each party has paid from
terms.py            what a party agreed to, pinned on its own disk
proposals.py        what a run asks of every party, and how that becomes a party's terms
request_checks.py   whatever goes beyond the terms is refused
refusals.py         the sentences of refusals, known to both sides
rule_terms.py       the clipping rules' settings that are agreed on, and the ranges of what moves
task_terms.py       the task that is agreed on: the settings that decide the loss, and their fingerprint
consent.py          the proposed terms as a person reads them before agreeing
reply_store.py      replies on the party's disk, stored before they are sent
party_data.py       a party's own records
party_training.py   a party's model and engine: the same local training as in one process
party_ledger.py     a party's own ledger: its account, and what each run is
party_statement.py  a party's own privacy statement
party.py            a party's service: it answers requests within its terms and its ledger's budget
registry.py         which node is which party: only signed answers count
coordinator.py      an engine that asks parties instead of computing
stragglers.py       parties that are late rest, and come back
array_coding.py     the arrays of a message, coded without loss
continuation.py     a new run from an old run's model
operations/         the operator's side: log lines, metrics, status, checks, key changes
traffic.py          bytes of a round's messages, before a run
prepare.py          what a coordinator needs before it contacts parties
certs.py            a development CA, a server certificate and key pairs
transport.py        those bytes in Flower's messages, by its public API
port/               the coordinator's public port: limits, strict heads, signatures before bodies, who is there
flwr141/            everything that is internal to Flower 1.41.0: the fleet API at the coordinator, a party's node
run.py              `fulcrum serve` and `fulcrum party` without their command lines
strategy.py         for people with a Flower app: a strategy that makes any client function private for whole parties
mod.py              and a mod: a client function with a private loop in it, and a guard at the door
app.py              the same as a plain Flower app, for `flwr run` and the simulation engine

All but transport.py, flwr141/, run.py, strategy.py, mod.py and app.py work without Flower, over any transport of bytes.
"""

from __future__ import annotations

import os

# Before anything imports flwr: it reads these once. Nothing is sent anywhere but to the coordinator.
FLOWER_ENVIRONMENT = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
os.environ.update(FLOWER_ENVIRONMENT)
