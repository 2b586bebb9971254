"""The keys of a Hugging Face `config.json`, read with clear errors: missing, wrong type, unsupported value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specs.errors import BadInputError
from specs.model import MAX_LAYERS, Activation

# Names of `transformers.activations.ACT2FN` that are functions we have.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """The file's keys, read with clear errors; `where` names the file in them."""

    keys: Mapping[str, object]
    where: str

    def fail(self, sentence: str) -> BadInputError:
        return BadInputError(f"{self.where}: {sentence}")

    def has(self, key: str) -> bool:
        return self.keys.get(key) is not None

    def size(self, key: str) -> int:
        """A size that the file must state."""
        if not self.has(key):
            raise self.fail(f"the key {key!r} is missing. Add it, as the model's own config.json has it.")
        return self._integer(key, self.keys[key])

    def num_layers(self, key: str = "num_hidden_layers") -> int:
        count = self.size(key)
        if count > MAX_LAYERS:
            raise self.fail(f"{key!r} is {count:,}, more than {MAX_LAYERS:,} layers are not supported.")
        return count

    def size_or(self, key: str, default: int) -> int:
        return self._integer(key, self.keys[key]) if self.has(key) else default

    def _integer(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{key!r} is {value!r}, a positive whole number is needed.")
        return value

    def number_or(self, key: str, default: float) -> float:
        return self._number(key, self.keys[key]) if self.has(key) else default

    def number(self, key: str) -> float:
        if not self.has(key):
            raise self.fail(f"the key {key!r} is missing. Add it, as the model's own config.json has it.")
        return self._number(key, self.keys[key])

    def _number(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise self.fail(f"{key!r} is {value!r}, a positive number is needed.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.keys.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"{key!r} is {value!r}, true or false is needed.")
        return value

    def activation(self, key: str, default: str) -> Activation:
        value = self.keys.get(key) or default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.fail(f"{key!r} is {value!r}; supported are {', '.join(sorted(ACTIVATIONS))}.")
        return ACTIVATIONS[value]

    def refuse(self, key: str, allowed: tuple[object, ...], why: str) -> None:
        """Refuse an option that is present with any other value than those in `allowed`."""
        value = self.keys.get(key)
        if value is not None and value not in allowed:
            raise self.fail(f"{key!r} is {value!r}, which is not supported: {why}.")

    def part(self, key: str) -> ConfigKeys:
        """A nested object; absent or null: an empty one."""
        value = self.keys.get(key)
        if value is None:
            return ConfigKeys({}, f"{self.where}, {key}")
        if not isinstance(value, dict):
            raise self.fail(f"{key!r} is {value!r}, an object is needed.")
        return ConfigKeys(value, f"{self.where}, {key}")

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.keys.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(f"{key!r} is {value!r}, a list of names is needed.")
        return tuple(value)
