"""Which parameters decay, and the model without pipeline stages."""


def get_params_for_weight_decay_optimization(module, neox_args):
    decay = {"params": [], "name": "weight_decay_params"}
    rest = {"params": [], "weight_decay": 0.0, "name": "no_weight_decay_params"}
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                flat = name == "bias" or type(inner).__name__ == "LayerNorm"
                (rest if flat else decay)["params"].append(parameter)
    return decay, rest


class SequentialWrapper:
    def __init__(self):
        self.cache = []

    def clear_cache(self):
        self.cache = []
