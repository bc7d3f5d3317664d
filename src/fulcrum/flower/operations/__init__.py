"""The operator's side of a federation, the same at coordinator and parties.

monitor.py            log lines, metrics and health of one process, with an HTTP endpoint on loopback
coordinator_status.py who is online, late, refused, out of budget and why: status.json
status_page.py        `fulcrum status`: status.json as a table
party_file.py         `fulcrum party party.toml`: a party's options in a file
checks.py             one check, one line: what `--check` prints
party_checks.py       `fulcrum party --check`
server_checks.py      `fulcrum serve --check`
key_changes.py        rotation and revocation of parties' keys: `fulcrum keys`

Nothing here learns anything from a party's records but what the party's own log says already.
"""
