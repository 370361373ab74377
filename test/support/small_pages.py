"""A model whose caches have pages of few tokens, so that short requests need many of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mstar.engine.spec import NodeResourceSpec, PagedKVSpec
from mstar.model.base import Model


class SmallPages:
    """`model`, with pages of `page_size` tokens."""

    def __init__(self, model: Model, page_size: int) -> None:
        self._model = model
        self._page_size = page_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_node_resources(self) -> Sequence[NodeResourceSpec]:
        return [
            replace(
                node,
                resources=tuple(
                    replace(spec, page_size=self._page_size) if isinstance(spec, PagedKVSpec) else spec
                    for spec in node.resources
                ),
            )
            for node in self._model.get_node_resources()
        ]
