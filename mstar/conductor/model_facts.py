"""`ModelFacts`: what the front asks of a model again and again, asked once. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from mstar.model.base import Model, ModelCard, OutputFormat


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What intake checks requests against, and shows of the model."""

    card: ModelCard
    max_seq_len: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    parameters: type[BaseModel]
    input_modalities: tuple[str, ...]
    output_format: OutputFormat
    embedding_size: int | None

    @classmethod
    def of(cls, model: Model) -> ModelFacts:
        return cls(
            card=model.card,
            max_seq_len=model.setup.max_seq_len,
            vocab_size=model.vocab_size(),
            stop_token_ids=tuple(model.stop_token_ids()),
            parameters=model.parameter_schema(),
            input_modalities=tuple(model.input_modalities()),
            output_format=model.output_format(),
            embedding_size=model.embedding_size(),
        )
