"""DeepSpeed's own part of the arguments."""

from dataclasses import dataclass


@dataclass
class NeoXArgsDeepspeedConfig:
    deepspeed: bool = True
    train_batch_size: int = None
    gradient_accumulation_steps: int = 1
