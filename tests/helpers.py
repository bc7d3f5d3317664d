"""Old place of support.federations; goes when tests/flower and tests/runs import that."""

from support.federations import toy_data as toy_data
