"""Which options of a module no other one equals or beats in everything: only they are worth a search."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def undominated(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Rows of [option, cost] that no other row equals or beats in everything."""
    if len(costs) == 1:
        return np.zeros(1, dtype=np.int64)
    below = (costs[:, None, :] <= costs[None, :, :]).all(axis=2)
    # Of equal rows the first stays.
    beaten = below & ~(below.T & np.tri(len(costs), dtype=bool))
    return np.flatnonzero(~beaten.any(axis=0))
