"""OpenAI's own types as judges of what a server says, stricter than OpenAI's SDK itself, which validates nothing."""

from functools import cache
from typing import Annotated, Any, get_args

from openai.types.realtime.realtime_server_event import RealtimeServerEvent
from pydantic import BaseModel, Field, TypeAdapter


@cache
def realtime() -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[get_args(RealtimeServerEvent)[0], Field(discriminator="type")])


@cache
def realtime_types() -> frozenset[str]:
    """The types of all GA server events."""
    union = get_args(RealtimeServerEvent)[0]
    models: tuple[type[BaseModel], ...] = get_args(union)
    return frozenset(get_args(model.model_fields["type"].annotation)[0] for model in models)
