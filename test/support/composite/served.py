"""The tiny composite model as a server can run it: what a client cannot send comes from the prompt's ids. No torch.

`forward_delay_s` in the checkpoint's configuration makes each forward of the language model take so much longer, for
tests that need requests which last; captured walks do not wait, so such deployments set `capture.enabled: false`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from support.composite.model import CARD as COMPOSITE
from support.composite.model import CompositeModel

from mstar.model.base import PreparedPrompt, PromptRequest

CARD = dataclasses.replace(
    COMPOSITE,
    name="served_composite",
    model="support.composite.served:ServedComposite",
    submodules="support.composite.served_nodes:build_submodule",
)
CARD_NAME = "support.composite.served:CARD"


class ServedComposite(CompositeModel):
    """Media and noise are waves whose length and phase the prompt decides."""

    def process_prompt(self, request: PromptRequest) -> PreparedPrompt:
        ids = request.token_ids or (1,)
        num_rows, width = 2 * (1 + ids[0] % 4), self._size("media_width")
        shape = (self._size("latent_rows"), self._size("latent_width"))
        inputs = {
            "media": np.sin(0.37 * np.arange(num_rows * width) + sum(ids)).reshape(num_rows, width),
            "latent": np.cos(0.53 * np.arange(shape[0] * shape[1]) + len(ids)).reshape(shape),
        }
        return super().process_prompt(dataclasses.replace(request, token_ids=ids, inputs=inputs))
