"""The table of functions that book-keeping knows: how each one's parameters get their per-example gradients.

Symbols: B examples, T positions, a the input, g the gradient of the output. Importing this package fills
`uses.FUNCTION_RULES`, one module per family of functions.
"""

from __future__ import annotations

from fulcrum.gradients.function_rules import attention as attention
from fulcrum.gradients.function_rules import convolutions as convolutions
from fulcrum.gradients.function_rules import direct as direct
from fulcrum.gradients.function_rules import embeddings as embeddings
from fulcrum.gradients.function_rules import linear as linear
from fulcrum.gradients.function_rules import norms as norms
from fulcrum.gradients.function_rules import recurrent as recurrent
from fulcrum.gradients.uses import FUNCTION_RULES

__all__ = ["FUNCTION_RULES"]
