from __future__ import annotations
import math
def format_epsilon(value: float, digits: int = 4) -> str:
    if not 0 < value < math.inf:
        return "infinite" if value == math.inf else f"{value:.4g}"
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return f"{math.ceil(value * scale * (1 - 1e-12)) / scale:.4g}"
