"""The Github component of The Pile, in the small edition that GPT-NeoX used."""

from data_prep.corpora._base import PublishedCorpus

CORPUS = PublishedCorpus(
    about="source files under 100,000 characters, 16 % sample, documents of 5.25 KiB",
    files={
        "github_small.jsonl.zst": "4323250bed817466de868f752b7685350123cff1f1363e87dfb6f22585b97f96"
    },
    where="its host (eaidata) is gone. Hugging Face monology/pile-uncopyrighted holds the component "
    "in the Pile's shards, in another order: --pile-set Github; for evaluation alone, "
    "monology/pile-test-val",
    format=".jsonl.zst, records with text and meta",
    licence="each file its own",
    notes="KERPLE's github is this small edition, github_small: other text gives other figures, "
    "by more than the digits that papers compare",
)
