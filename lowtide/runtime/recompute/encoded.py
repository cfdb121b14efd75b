"""Stored smaller: a source drops its storage for an exact smaller form, which stays or is swapped.

What: a site with a codec gets a `RecomputedSource` (recipe_sources.py) whose program is a decoder and whose one link
leads to the smaller form: a `ResidentSource` if that stays, an `OffloadedSource` if it is swapped. So everything that
holds for recomputed sources holds here: shared by all saved views of the storage and by recipes that start from it,
made once in a backward pass and let go of after its last reader, made again after `retain_graph`, versions compared,
fingerprints compared.

When: as the next operator saves something, like the copy of a swapped site (runtime/offload/departures.py), because
some operators save what they have not filled yet.

Where the bytes do not fit the codec any more, or were written to since they were saved, the source keeps its storage:
it counts as a divergence, the guard may spill it, and the codec is not used again (`Tide.failed_recipes` names the
site).

On an accelerator integers are narrowed without a look, if there are not more of them than planned. Where some do not
fit, the fingerprint is made to differ: `backward()` raises at its end, and the site is kept from then on.

Cost: that of the codec (tensors/codecs.py), and some 20 us a site. Not covered: tensors that something else holds:
their bytes stay on the device beside the smaller form, as the plan's account says.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowtide.core.recipe import Codec
from lowtide.runtime.recompute.recipe_inputs import Link, Source
from lowtide.runtime.recompute.recipe_sources import RecomputedSource
from lowtide.tensors.codecs import encode, fits_unseen
from lowtide.tensors.view import Shape


def store_smaller(
    source: RecomputedSource, codec: Codec, planned_bytes: int, hold: Callable[[torch.Tensor], Source]
) -> Source | str:
    """Let `source` drop its storage for the smaller form, which `hold` makes a source of: that one, or why not.

    `planned_bytes`: of the storage, when `codec` was chosen.
    """
    assert source.held is not None
    if not source.is_intact():
        return "it was written to after it had been saved"
    is_looked_at = source.device.type == "cpu" or fits_unseen(source.shape.dtype) == codec.kind
    if not is_looked_at and source.nbytes > planned_bytes:
        return f"it is larger than planned, and nobody looks whether it fits its codec ({codec.kind})"
    # A plan serves smaller batches too.
    limit_bytes = codec.nbytes * source.nbytes / planned_bytes
    encoded = encode(codec.kind, source.held, source.shape.dtype, limit_bytes)
    if encoded is None:
        return f"it does not fit its codec any more ({codec.kind})"
    source.program = encoded.decoder
    form = hold(encoded.data)
    source.drop((Link(source.name, form, Shape.of(encoded.data)),))
    if encoded.misfit is not None:
        # Narrowing keeps the lowest bits of each word: with one more, none is what is decoded.
        assert isinstance(source.fingerprint, torch.Tensor)
        source.fingerprint = source.fingerprint + encoded.misfit
    return form
