"""OpenWebText2, the Pile's web text."""

from data_prep.corpora._base import PublishedCorpus

CORPUS = PublishedCorpus(
    about="web pages linked from Reddit, 17.1 million documents of 3.85 KiB",
    files={
        "openwebtext2.jsonl.zst.tar": (
            "9043d1b93c35ff1a38a17e16c73c009d4617dcaab6da15adc0faf4779739a027"
        )
    },
    format="a tar of monthly .jsonl.zst files with text and meta; unpack it and give the folder",
    licence="MIT on the card of the copy segyges/OpenWebText2 (Hugging Face); texts: their authors",
    notes="OpenWebText (Skylion007/openwebtext) is a different set: its figures do not compare",
)
