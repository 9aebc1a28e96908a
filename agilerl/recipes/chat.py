"""A conversation with a model: what it is asked is what it was trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agilerl.config import load_config
from agilerl.data.chat import ChatRenderer
from agilerl.data.encoder import TextEncoder
from agilerl.data.records import Chat, RowFault
from agilerl.data.template import Template
from agilerl.errors import ConfigError, DataError
from agilerl.recipes.describe import find_config
from agilerl.recipes.generation import stop_ids, stream
from agilerl.recipes.open import OpenModel

__all__ = ["Conversation", "check_temperature"]


def check_temperature(value: float) -> None:
    """Refuse a temperature that tokens cannot be drawn at.

    Raises:
        ConfigError: It is negative or not finite.
    """
    if not (math.isfinite(value) and value >= 0.0):
        raise ConfigError(
            f"temperature is {value}; it must be a finite number of at least 0 (0: the most likely answer)."
        )


@dataclass
class Conversation:
    """Turns so far, and how they are put to the model.

    With a chat template the whole conversation goes through it; without one, or with ``plain``, each message stands alone and
    the model continues it, as in training on plain prompts.
    """

    opened: OpenModel
    system: str | None = None
    plain: bool = False
    max_new_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if not self.opened.tokenizer.chat_template:
            self.plain = True
        if self.plain and self.system is not None:
            raise ConfigError("A system message needs a chat template, and this model is asked without one.")

    @classmethod
    def like_training(cls, checkpoint: str, opened: OpenModel, *, plain: bool | None, **kwargs: Any) -> Conversation:
        """A conversation in the form that the run beside ``checkpoint`` trained, where there is such a run."""
        saved = find_config(checkpoint)
        if saved is not None:
            data = load_config(saved).config.data
            kwargs["system"] = kwargs.get("system") or data.system
            kwargs["template_kwargs"] = dict(data.chat_template_kwargs)
            plain = data.chat_template == "none" if plain is None else plain
        return cls(opened, plain=bool(plain), **kwargs)

    def ask(self, message: str) -> Iterator[str]:
        """Pieces of the answer, as they come; the turn is kept when the answer is complete."""
        tokenizer, model = self.opened.tokenizer, self.opened.model
        prompt = self._prompt(message)
        answer = ""
        for piece in stream(
            model,
            tokenizer,
            prompt,
            stop=stop_ids(model, tokenizer),
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=self.seed + len(self.turns),
        ):
            answer += piece
            yield piece
        self.turns += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forget the turns so far."""
        self.turns.clear()

    def _prompt(self, message: str) -> list[int]:
        tokenizer = self.opened.tokenizer
        if self.plain:
            return TextEncoder(tokenizer).encode([message], special=True)[0]
        system = [{"role": "system", "content": self.system}] if self.system else []
        template = Template(tokenizer, None, self.template_kwargs)
        turns: list[Any] = [*system, *self.turns, {"role": "user", "content": message}]
        encoder = TextEncoder(tokenizer, markers=template.markers, tags=template.tags)
        try:
            return ChatRenderer(encoder, template).prompt(Chat(turns))
        except RowFault as fault:
            raise DataError(f"This conversation {fault.message}.") from None
