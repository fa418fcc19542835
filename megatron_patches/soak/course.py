"""What is trained: a small model, a text made here, and how many steps fill the time."""

from __future__ import annotations

import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

VOCABULARY = 64
DOCUMENTS = 40
SAVE_EVERY = 10  # steps
KEEP = 3  # checkpoints
STALL_SECONDS = 6.0  # far more than a step or a save takes, even on a busy machine
ACCUMULATION, MICRO_BATCH = 2, 2

SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "pos_emb": "kerple_log",
    "norm": "layernorm",
    "no_weight_tying": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "scaled_upper_triang_masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8}},
    "weight_decay": 0.1,
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "gradient_accumulation_steps": ACCUMULATION,
    "lr_decay_style": "cosine",
    "warmup": 0.02,
    "gradient_clipping": 1.0,
    "precision": "fp32",
    "distributed_backend": "gloo",
    # A file of the optimizer for each process: more that can be torn.
    "zero_optimization": {"stage": 1},
    "checkpoint_factor": SAVE_EVERY,
    "keep_last_n_checkpoints": KEEP,
    "eval_interval": 10 * SAVE_EVERY,
    "eval_iters": 1,
    "log_interval": 1,
    "watch_stall_seconds": STALL_SECONDS,
    "padded_vocab_size": VOCABULARY,
    "dataset": "soak",
    "run_name": "soak",
}


@dataclass(frozen=True)
class Course:
    """A training of `iterations` steps, its files in `work`.

    Attributes:
        work: holds the text, the settings, and the folders of the runs.
        place: where the run that is broken lies; a file system of its own where there is one.
        processes: ranks on this machine.
        seed: of the text and the model.
        iterations: of the whole training.
    """

    work: Path
    place: Path
    processes: int
    seed: int
    iterations: int

    @property
    def run(self) -> Path:
        return self.place / "run"

    @property
    def unbroken(self) -> Path:
        return self.work / "unbroken"

    @property
    def batch(self) -> int:
        """Samples a step."""
        return MICRO_BATCH * ACCUMULATION * self.processes

    def command(self, folder: Path) -> list[str]:
        """The command that trains in `folder`, the same each time; its file is written here."""
        parts = {"train": "train", "valid": "valid", "test": "valid"}
        text = {f"{key}_data_paths": [str(self.work / part)] for key, part in parts.items()}
        settings = {**SETTINGS, **text, "train_iters": self.iterations, "seed": self.seed}
        settings |= {"save": str(folder), "num_gpus": self.processes}
        file = self.work / f"{folder.name}.yml"
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        return [sys.executable, "deepy.py", "train.py", str(file)]

    def described(self) -> dict[str, Any]:
        """Without the paths, for the record."""
        kept = {k: v for k, v in asdict(self).items() if k not in ("work", "place")}
        return {**kept, "save_every": SAVE_EVERY, "keep": KEEP, "accumulation": ACCUMULATION}


def write_text(work: Path, seed: int) -> None:
    """`train` and `valid` in `work`: noisy counting, which a small model can learn; kept if there."""
    import numpy as np

    from data_prep.indexed import write_indexed

    chance = random.Random(seed)
    for part, documents in (("train", DOCUMENTS), ("valid", 4)):
        if (work / f"{part}.idx").is_file():
            continue
        texts = []
        for _ in range(documents):
            place, tokens = chance.randrange(VOCABULARY), []
            for _ in range(chance.randrange(200, 2000)):
                place += chance.randrange(1, 4)
                tokens.append(1 + place % (VOCABULARY - 4))
            texts.append(np.array([*tokens, 0]))
        about = {"fingerprint": "soak", "vocab_size": VOCABULARY - 3}
        size = 2 * sum(map(len, texts))
        sidecar = {"tokenizer": about, "text_bytes": size}
        write_indexed(work / part, texts, vocab_size=VOCABULARY - 3, sidecar=sidecar)
