"""The Github component of The Pile, in the small edition that GPT-NeoX used."""

from data_prep.corpora._base import PublishedCorpus

CORPUS = PublishedCorpus(
    about="source files under 100,000 characters, 16 % sample, documents of 5.25 KiB",
    files={
        "github_small.jsonl.zst": "4323250bed817466de868f752b7685350123cff1f1363e87dfb6f22585b97f96"
    },
    format=".jsonl.zst with text and meta",
    licence="each file its own",
    notes="its original hosts are gone; monology/pile-uncopyrighted (Hugging Face) holds the "
    "component under meta.pile_set_name Github, in another order",
)
