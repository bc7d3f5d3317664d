"""The coordinator's public port: what stands between strangers and the federation. Works without Flower.

limits.py     how much a stranger and a party may take: connections, seconds, bytes, requests; the file limit
http.py       the head of an HTTP request, read strictly
tokens.py     rates: so many per second, and a burst
visitors.py   who is connected, at which stage, and who is dropped first
server.py     the server: TLS, then the head, then the signature, and only then the body
presence.py   when each party was last heard of, since when it is offline, and why
"""
