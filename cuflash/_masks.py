"""Masks: which keys a query row may see.

Every mask here is one run of keys per row whose two ends never move left as the row grows. From the two ends
follow the tiles a kernel visits, the tiles that need no test, and, seen from the keys, the rows of the backward
pass. Each class has a twin of the same name and fields in ``kernels/mask.cuh``.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np


def _clamp(value, high):
    return np.clip(value, 0, high) if isinstance(value, np.ndarray) else min(max(value, 0), high)


@dataclass(frozen=True)
class Full:
    """Every row sees every key."""

    name: ClassVar[str] = "full"
    first_shift: ClassVar[int] = 0
    end_shift: ClassVar[int] = 0

    def first_key(self, i, keys):
        """First key that row ``i`` sees."""
        return i * 0

    def end_key(self, i, keys):
        """One past the last key that row ``i`` sees."""
        return i * 0 + keys


@dataclass(frozen=True)
class Causal:
    """Row i sees keys ``j < i + end_shift``: a limit on the right alone."""

    end_shift: int
    name: ClassVar[str] = "causal"
    first_shift: ClassVar[int] = 0

    def first_key(self, i, keys):
        """First key that row ``i`` sees."""
        return i * 0

    def end_key(self, i, keys):
        """One past the last key that row ``i`` sees."""
        return _clamp(i + self.end_shift, keys)


@dataclass(frozen=True)
class Window:
    """Row i sees keys ``i + first_shift <= j < i + end_shift``."""

    first_shift: int
    end_shift: int
    name: ClassVar[str] = "window"

    def first_key(self, i, keys):
        """First key that row ``i`` sees."""
        return _clamp(i + self.first_shift, keys)

    def end_key(self, i, keys):
        """One past the last key that row ``i`` sees."""
        return _clamp(i + self.end_shift, keys)


MASKS = {mask.name: mask for mask in (Full, Causal, Window)}


def make(queries, keys, causal, window):
    """The mask of ``causal`` and ``window``, as the simplest class that hides the same keys.

    One offset serves both: 0 for ``causal="top-left"``, else ``keys - queries``. Shifts are brought into
    ``[-queries, keys]``, beyond which they hide nothing more, so that sums with a row index fit 32 bits.
    """
    offset = 0 if causal == "top-left" else keys - queries
    left, right = window if window is not None else (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    first_shift = -queries if left is None else min(max(offset - left, -queries), keys)
    end_shift = keys if right is None else min(max(offset + right + 1, -queries), keys)
    if first_shift + queries - 1 > 0:
        return Window(first_shift, end_shift)
    return Full() if end_shift >= keys else Causal(end_shift)
