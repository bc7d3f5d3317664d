"""The no-tuning suite: are the default settings as good as the best fixed clipping norm and learning rate?

scenarios.py   reads no-tuning.toml: the scenarios, which half is set aside, the grid
sources.py     the scenarios' data sets: parts of public ones, and made-up sentences
models.py      the scenarios' own models: GroupNorm, LayerNorm, embeddings, attention
jobs.py        the runs of a scenario: the grid, the default, the other starts, the rivals
summary.py     the best fixed cell, chosen and scored on different seeds, and the gaps to it
report.py      summary.json, summary.md and the figure
"""
