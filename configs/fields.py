"""Reading one field of a Hugging Face config: present, of the right type, never a hidden default."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

#: Fields that transformers writes for any model and that say nothing about the forward pass of a decoder.
GENERIC_FIELDS = frozenset(
    [
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    ]
)

#: Fields that change the forward pass of some decoder and that none of ours computes: name -> neutral values.
NOT_COMPUTED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (None, False),
    "attention_multiplier": (None,),
    "attention_sinks": (None, False),
    "attn_logit_softcapping": (None, 0, 0.0),
    "cross_attention_hidden_size": (None,),
    "embedding_multiplier": (None, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "is_encoder_decoder": (None, False),
    "logit_scale": (None, 1.0),
    "mlp_bias": (None, False),
    "pruned_heads": (None, {}),
    "residual_multiplier": (None, 1.0),
}


#: More than any model has, by field: what is made for each of them is bounded.
AT_MOST = {"num_hidden_layers": 1000}


class ConfigError(ValueError):
    """A config that we cannot take: names the file, the field, its value and what is accepted."""


class Fields:
    """A read-only view of one config that remembers which of its fields were read.

    ``source`` is what error messages call it: a path, or ``hf_config`` for an object. ``as_published`` says that the
    fields are those of a file and no class has added its own, so that an unknown one can be told for a misspelling.
    ``path`` leads to a nested config (``text_config.``); ``generic`` are fields that are known without being read.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        *,
        as_published: bool = True,
        path: str = "",
        generic: frozenset[str] = GENERIC_FIELDS,
    ) -> None:
        for name in values:
            if not isinstance(name, str):
                raise ConfigError(f"{source}: field {path}{name!r}: the name of a field must be text")
        self._values = values
        self.source = source
        self.as_published = as_published
        self._path = path
        self._known: set[str] = set(generic)

    def error(self, name: str, problem: str) -> ConfigError:
        """Return the error for ``name``, to be raised by the caller."""
        shown = repr(self._values[name]) if name in self._values else "absent"
        return ConfigError(f"{self.source}: field {self._path + name!r} is {shown}: {problem}")

    def has(self, name: str) -> bool:
        """Return whether ``name`` is there and not null."""
        self._known.add(name)
        return self._values.get(name) is not None

    def require(self, name: str, kind: type[T]) -> T:
        """Return the value of ``name``; raise ConfigError when it is absent, null or not a ``kind``."""
        return self.one_of((name,), kind)

    def one_of(self, names: Sequence[str], kind: type[T]) -> T:
        """Return the one value that is spelled as any of ``names``; different values are a contradiction."""
        spelled = [name for name in names if self.has(name)]
        if not spelled:
            raise self.error(names[0], f"it is required, as {kind.__name__}{self._other_names(names)}")
        values = [self._checked(name, kind) for name in spelled]
        for name, value in zip(spelled, values, strict=True):
            if value != values[0]:
                raise self.error(spelled[0], f"it contradicts {self._path + name!r} = {self._values[name]!r}")
        return values[0]

    def _other_names(self, names: Sequence[str]) -> str:
        others = f"; it may also be called {' or '.join(map(repr, names[1:]))}" if len(names) > 1 else ""
        unread = [key for key in self._values if key not in self._known]
        near = difflib.get_close_matches(names[0], unread, n=1)
        return f"{others}; is {near[0]!r} a misspelling of it?" if near else others

    def _checked(self, name: str, kind: type[T]) -> T:
        value = self._values[name]
        if kind is float and type(value) is int and abs(value) < 2**63:
            return kind(value)  # type: ignore[call-arg]
        if type(value) is not kind:
            raise self.error(name, f"{kind.__name__} is required")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(name, "a finite number is required")
        return value

    def positive(self, *names: str) -> int:
        """Return ``one_of(names, int)``; raise ConfigError unless it is greater than zero and what a model may have."""
        value = self.one_of(names, int)
        name = next(name for name in names if self.has(name))
        if value <= 0:
            raise self.error(name, "it must be greater than zero")
        if value > AT_MOST.get(name, value):
            raise self.error(name, f"it must be at most {AT_MOST[name]}")
        return value

    def between(self, name: str, low: float, high: float) -> float:
        """Return ``require(name, float)``; raise ConfigError unless it lies between ``low`` and ``high``, excluded."""
        value = self.require(name, float)
        if not low < value < high:
            raise self.error(name, f"it must lie between {low} and {high}")
        return value

    def exactly(self, names: Sequence[str], value: Any) -> None:
        """Raise ConfigError unless the field that is spelled as any of ``names`` is there and is ``value``."""
        if self.one_of(names, type(value)) != value:
            raise self.error(next(name for name in names if self.has(name)), f"accepted: {value!r}")

    def only(self, name: str, accepted: tuple[Any, ...]) -> None:
        """Raise ConfigError unless ``name`` is one of ``accepted`` (None stands for absent or null)."""
        self._known.add(name)
        if not self._is_one_of(name, accepted):
            raise self.error(name, f"accepted: {', '.join(map(repr, accepted))}")

    def _is_one_of(self, name: str, accepted: tuple[Any, ...]) -> bool:
        """Return whether ``name`` is one of ``accepted``, where 1 is 1.0 and neither is True."""
        value = self._values.get(name)
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted)

    def absent_means(self, name: str, value: T) -> T:
        """Return ``name``, or ``value`` when absent: only where published configs leave it out with that meaning."""
        return self.require(name, type(value)) if self.has(name) else value

    def nullable(self, name: str) -> int | None:
        """Return ``positive(name)``, or None when null; raise ConfigError when it is absent."""
        if name not in self._values:
            raise self.error(name, "it is required, as int or null")
        return self.positive(name) if self.has(name) else None

    def nested(self, name: str) -> Fields:
        """Return the mapping ``name`` as Fields of its own, none known yet; raise ConfigError when it is none."""
        if not self.has(name):
            raise self.error(name, "it is required, as a mapping")
        values = self._values[name]
        if not isinstance(values, Mapping):
            raise self.error(name, "a mapping is required")
        path = f"{self._path}{name}."
        return Fields(values, self.source, as_published=self.as_published, path=path, generic=frozenset())

    def inheriting(self, outer: Fields, names: Iterable[str]) -> Fields:
        """Return these fields with those of ``names`` that only ``outer`` has; different values are a contradiction."""
        values = dict(self._values)
        for name in names:
            if outer.has(name) and self.has(name) and outer._values[name] != self._values[name]:
                raise outer.error(name, f"it contradicts {self._path + name!r} = {self._values[name]!r}")
            if outer.has(name):
                values[name] = outer._values[name]
        return Fields(values, self.source, as_published=self.as_published, path=self._path)

    def reads(self, *names: str) -> None:
        """Count ``names`` as known: fields that are allowed and that do not change the forward pass."""
        self._known.update(names)

    def refuse(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise ConfigError for a field of ``neutral`` whose value is not one of its neutral ones."""
        self._known.update(neutral)
        for name, values in neutral.items():
            if not self._is_one_of(name, values):
                raise self.error(name, "our model does not compute this; drop `--model-impl atom`")

    def optional(self, name: str) -> Any:
        """Return the raw value of ``name`` or None; only for fields whose absence has a defined meaning."""
        self._known.add(name)
        return self._values.get(name)

    def names(self) -> list[str]:
        """Return the names of all fields."""
        return list(self._values)

    def refuse_unknown(self) -> None:
        """Raise ConfigError for fields of a published config that we do not know: they may change the model."""
        if not self.as_published:
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
