"""All arguments in one class: what follows from others, and the check of the types."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_origin

from pkg_resources import packaging

from .deepspeed_args import NeoXArgsDeepspeedConfig
from .neox_args import ATTENTION_TYPE_CHOICES, NeoXArgsModel, NeoXArgsTraining

assert packaging.version.Version("2.0") < packaging.version.Version("10.0")


def expand_attention_types(attention_config, num_layers):
    """[[["global", "flash"], 2]] -> the type of each layer."""
    if all(isinstance(kind, str) for kind in attention_config):
        return attention_config  # expanded already
    layers = []
    for kinds, times in attention_config:
        layers += kinds * (num_layers // len(kinds) if times == "all" else times)
    return layers


@dataclass
class NeoXArgs(NeoXArgsDeepspeedConfig, NeoXArgsModel, NeoXArgsTraining):
    def __post_init__(self):
        self.calculate_derived()
        if not self.validate_types():
            raise ValueError("a value is of another type than its field")

    @classmethod
    def from_dict(cls, values):
        return cls(**values)

    @classmethod
    def consume_deepy_args(cls, input_args=None):
        script, *files = input_args
        values = {"user_script": script}
        for file in files:
            with open(file) as text:
                values |= json.load(text)
        return cls(**values)

    def get_deepspeed_main_args(self):
        return [self.user_script, json.dumps(self.to_dict())]

    def to_dict(self):
        """What a worker gets: everything that was not left at its default."""
        fields = self.__dataclass_fields__
        values = asdict(self)
        return {key: v for key, v in values.items() if v != fields[key].default}

    def calculate_derived(self):
        if self.attention_config is None:
            self.attention_config = [[["global"], self.num_layers]]
        self.attention_config = expand_attention_types(self.attention_config, self.num_layers)
        assert len(self.attention_config) == self.num_layers
        for item in self.attention_config:
            assert item in ATTENTION_TYPE_CHOICES, item

    def validate_types(self):
        """Like the real one it knows plain types and Literals, and looks at no letter's case."""
        for name, field in self.__dataclass_fields__.items():
            value = getattr(self, name)
            if value is None or field.type is Any or type(value) is field.type:
                continue
            if type(value) is int and field.type is float:
                continue
            if get_origin(field.type) is Literal:
                known = [v.lower() if isinstance(v, str) else v for v in field.type.__args__]
                if (value.lower() if isinstance(value, str) else value) in known:
                    continue
            return False
        return True
