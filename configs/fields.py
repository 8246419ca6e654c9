"""Reading one field of a Hugging Face config: present, of the right type, never a hidden default."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

#: Fields that transformers writes for any model and that say nothing about the forward pass of a decoder.
GENERIC_FIELDS = frozenset(
    {
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_position_embeddings",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "quantization_config",
        "return_dict",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)


class ConfigError(ValueError):
    """A config that we cannot take: names the file, the field, its value and what is accepted."""


class Fields:
    """A read-only view of one config that remembers which of its fields were read.

    ``source`` is what error messages call it: a path, or ``hf_config`` for an object. ``as_published`` says that the
    fields are those of a file and no class has added its own, so that an unknown one can be told for a misspelling.
    """

    def __init__(self, values: Mapping[str, Any], source: str, *, as_published: bool = True) -> None:
        self._values = values
        self.source = source
        self._as_published = as_published
        self._known: set[str] = set(GENERIC_FIELDS)

    def error(self, name: str, problem: str) -> ConfigError:
        """Return the error for ``name``, to be raised by the caller."""
        shown = repr(self._values[name]) if name in self._values else "absent"
        return ConfigError(f"{self.source}: field {name!r} is {shown}: {problem}")

    def has(self, name: str) -> bool:
        """Return whether ``name`` is there and not null."""
        self._known.add(name)
        return self._values.get(name) is not None

    def require(self, name: str, kind: type[T]) -> T:
        """Return the value of ``name``; raise ConfigError when it is absent, null or not a ``kind``."""
        self._known.add(name)
        value = self._values.get(name)
        if value is None:
            near = difflib.get_close_matches(name, [key for key in self._values if key not in self._known], n=1)
            hint = f"; is {near[0]!r} a misspelling of it?" if near else ""
            raise self.error(name, f"it is required, as {kind.__name__}{hint}")
        if kind is float and type(value) is int:
            return kind(value)  # type: ignore[call-arg]
        if type(value) is not kind:
            raise self.error(name, f"{kind.__name__} is required")
        return value

    def positive(self, name: str, kind: type[T]) -> T:
        """Return ``require(name, kind)``; raise ConfigError unless it is greater than zero."""
        value = self.require(name, kind)
        if not value > 0:  # type: ignore[operator]
            raise self.error(name, "it must be greater than zero")
        return value

    def between(self, name: str, low: float, high: float) -> float:
        """Return ``require(name, float)``; raise ConfigError unless it lies between ``low`` and ``high``, excluded."""
        value = self.require(name, float)
        if not low < value < high:
            raise self.error(name, f"it must lie between {low} and {high}")
        return value

    def one_of(self, names: Iterable[str], kind: type[T]) -> T:
        """Return the one value that is spelled as any of ``names``; different values are a contradiction."""
        spelled = [name for name in names if self.has(name)]
        if not spelled:
            return self.require(next(iter(names)), kind)
        values = {self.require(name, kind) for name in spelled}
        if len(values) > 1:
            raise self.error(spelled[0], f"it contradicts {spelled[1]!r} = {self._values[spelled[1]]!r}")
        return values.pop()

    def only(self, name: str, accepted: tuple[Any, ...]) -> None:
        """Raise ConfigError unless ``name`` is one of ``accepted`` (None stands for absent or null)."""
        self._known.add(name)
        if self._values.get(name) not in accepted:
            raise self.error(name, f"accepted: {', '.join(map(repr, accepted))}")

    def absent_means(self, name: str, value: T) -> T:
        """Return ``name``, or ``value`` when absent: only where published configs leave it out with that meaning."""
        return self.require(name, type(value)) if self.has(name) else value

    def reads(self, *names: str) -> None:
        """Count ``names`` as known: fields that are allowed and that do not change the forward pass."""
        self._known.update(names)

    def refuse(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise ConfigError for a field of ``neutral`` whose value is not one of its neutral ones."""
        self._known.update(neutral)
        for name, values in neutral.items():
            if self._values.get(name) not in values:
                raise self.error(name, "our model does not compute this; drop `--model-impl atom`")

    def optional(self, name: str) -> Any:
        """Return the raw value of ``name`` or None; only for fields whose absence has a defined meaning."""
        self._known.add(name)
        return self._values.get(name)

    def refuse_unknown(self) -> None:
        """Raise ConfigError for fields of a published config that we do not know: they may change the model."""
        if not self._as_published:
            return
        unknown = [name for name in self._values if name not in self._known]
        for name in unknown:
            near = difflib.get_close_matches(name, self._known, n=1, cutoff=0.85)
            if near:
                raise self.error(name, f"unknown field; did you mean {near[0]!r}?")
        if unknown:
            raise self.error(
                unknown[0],
                f"unknown fields ({', '.join(unknown)}), which may change the model: "
                "take out those that do not, or drop `--model-impl atom`",
            )
