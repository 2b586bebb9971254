"""Which options of a module no other one equals or beats in everything: only they are worth a search."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def undominated(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Rows of [option, cost] that no other row equals or beats in everything."""
    if len(costs) == 1:
        return np.zeros(1, dtype=np.int64)
    order = np.lexsort(costs.T[::-1])
    ordered = costs[order]
    beaten = (ordered[:, None, :] <= ordered[None, :, :]).all(axis=2)
    # An earlier row beats; of equal rows the first stays.  (Sorted, so no later row beats an unequal earlier one.)
    return order[~np.triu(beaten, k=1).any(axis=0)]
