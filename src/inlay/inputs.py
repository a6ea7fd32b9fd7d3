"""The forms in which a caller may give a prompt, told apart and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from inlay.errors import ParameterError
from inlay.pml import Prompt, PromptBuilder

Message: TypeAlias = Mapping[str, Any]
PromptInput: TypeAlias = "str | Sequence[int] | Prompt | PromptBuilder | Mapping[str, Any] | Sequence[Message]"


def check_ids(ids: Sequence[Any], vocabulary: int, *, what: str = "a prompt") -> list[int]:
    """Token ids as a list. vocabulary: how many there are. Raises ParameterError for what is none of them."""
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocabulary:
            raise ParameterError(f"{what} holds the token id {i!r}; ids go from 0 to {vocabulary - 1}")
    return list(ids)


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ParameterError for a chat message without a role or content of text."""
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ParameterError(f"a chat message is {dict(message)!r}; it needs a 'role' and a 'content' of text")


def as_prompt(prompt: Prompt | PromptBuilder) -> Prompt:
    """The prompt that this is, or builds."""
    return prompt.build() if isinstance(prompt, PromptBuilder) else prompt


def unwrap(prompt: Mapping[str, Any]) -> Any:
    """What a prompt written as a mapping holds. Raises ParameterError for unknown keys."""
    keys = set(prompt)
    if keys == {"prompt"} or keys == {"prompt_token_ids"} or keys == {"messages"}:
        return next(iter(prompt.values()))
    raise ParameterError(
        f"a prompt has the keys {sorted(map(str, keys))}; write {{'prompt': …}}, {{'prompt_token_ids': …}} or "
        "{'messages': …}"
    )


def is_conversation(prompt: Any) -> bool:
    """Whether this is a list of chat messages."""
    return (
        isinstance(prompt, Sequence)
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def is_several(prompts: Any) -> bool:
    """Whether this is a list of prompts, not one prompt that happens to be a list."""
    if isinstance(prompts, (str, Mapping, Prompt, PromptBuilder)) or not isinstance(prompts, Sequence):
        return False
    return not (is_conversation(prompts) or (bool(prompts) and all(isinstance(item, int) for item in prompts)))
