"""How like a dreamt picture of the table is to the true one, in a dream's usual measures.

- `psnr_db`: the peak signal-to-noise ratio.
- `errors_px`: how far the centroid of all pixels of a disc's colour is from where the disc truly is.
- `lost`: whether of the disc's true pixels less than a quarter have its colour.

A pixel has a disc's colour within `ALIKE` in RGB space. `omni-live bench world` measures the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_live.clients.envs.table import DISCS

ALIKE: Final = 70.0  # of 441; the two discs most alike are 141 apart
_QUARTER: Final = 0.25

Images = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Likeness:
    """One dreamt picture, beside what is true."""

    psnr_db: float
    errors_px: tuple[float, ...]
    """Of the discs of which any pixel was dreamt."""
    lost: tuple[bool, ...]


def likeness(true: Images, dreamt: Images, discs: Sequence[complex]) -> Likeness:
    """Compare two pictures uint8[side, side, 3]; `discs` are the true places, in table widths."""
    errors, lost = [], []
    for place, (_, colour) in zip(discs, DISCS, strict=True):
        has, pixels = _has(dreamt, colour), _has(true, colour)
        lost.append(bool((has & pixels).sum() < _QUARTER * pixels.sum()))
        if has.any():
            rows, columns = np.nonzero(has)
            centroid = complex(columns.mean() + 0.5, rows.mean() + 0.5)
            errors.append(abs(centroid - place * len(true)))
    wrong = float(np.square(true.astype(np.float32) - dreamt).mean())
    psnr_db = float(10 * np.log10(255**2 / max(wrong, 1e-3)))  # 78 dB and no more where nothing is wrong
    return Likeness(psnr_db, tuple(errors), tuple(lost))


def _has(picture: Images, colour: tuple[int, int, int]) -> NDArray[np.bool_]:
    has: NDArray[np.bool_] = np.square(picture - np.asarray(colour, np.float32)).sum(-1) < ALIKE**2
    return has
