"""The public data sets that Fulcrum knows by name: where they are, how they are fetched, checked and read."""
