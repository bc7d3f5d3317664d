"""Fulcrum's server and client, where Flower looks for them."""

from fulcrum.flower.app import client, server

__all__ = ["client", "server"]
