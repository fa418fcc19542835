"""OpenWebText2, the Pile's web text."""

from data_prep.corpora._base import PublishedCorpus

CORPUS = PublishedCorpus(
    about="web pages linked from Reddit, 17.1 million documents of 3.85 KiB",
    files={
        "openwebtext2.jsonl.zst.tar": (
            "9043d1b93c35ff1a38a17e16c73c009d4617dcaab6da15adc0faf4779739a027"
        )
    },
    where="Hugging Face segyges/OpenWebText2: the original archive, 29.3 GB; the first hosts "
    "(the-eye, eaidata) are gone. monology/pile-uncopyrighted lacks this component",
    format="a tar of monthly .jsonl.zst files, records with text and meta; shards of The Pile "
    "with --pile-set OpenWebText2",
    licence="MIT on the card of segyges/OpenWebText2; texts: their authors",
    notes="OpenWebText (Skylion007/openwebtext) is a different set: its figures do not compare. In "
    "shards of The Pile the component is oversampled, so leave exact duplicates out",
)
